"""Background work of a screen, which ends with the screen: shell commands (!COMMAND). Also the
editor of $VISUAL or $EDITOR, which uses the terminal while the chat waits."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

from textual.app import SuspendNotSupported
from textual.dom import DOMNode
from textual.screen import Screen
from textual.worker import Worker

from localllm.errors import UsageError
from localllm_tui.control import command_actions
from localllm_tui.control.chat import ChatController
from localllm_tui.widgets.composer import Composer


def start(
    node: DOMNode,
    work: Callable[[], Coroutine[None, None, None]],
    group: str,
    *,
    exclusive: bool = True,
    exit_on_error: bool = False,
) -> Worker[None]:
    """Run `work` while `node` exists; `exclusive`: in place of other work of its group. An error
    ends only this work, unless `exit_on_error`.

    Takes the function, not its coroutine: Python would warn of a coroutine that an exit prevents
    from starting.
    """
    return node.run_worker(work, group=group, exclusive=exclusive, exit_on_error=exit_on_error)


# Editors to try if neither variable is set; the first installed one is used.
_EDITORS = ("notepad",) if os.name == "nt" else ("sensible-editor", "nano", "vi")


async def open_editor(screen: Screen[Any], chat: ChatController, _: str) -> None:
    """/editor, Ctrl+G: open the message in the editor; the saved text becomes the input. Raises
    UsageError if there is no editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or _installed_editor()
    if not editor:
        raise UsageError("no editor is set", hint="set EDITOR, for example: export EDITOR=nano")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message.md"
        file.write_text(screen.query_one(Composer).written, encoding="utf-8")
        # The editor gets Ctrl+C. This is a handler because an ignored signal would be inherited.
        before = signal.signal(signal.SIGINT, _leave_to_editor)
        try:
            with screen.app.suspend():
                done = subprocess.run([*_words(editor), str(file)]).returncode
            text = file.read_text(encoding="utf-8").rstrip("\n")
        except SuspendNotSupported:
            raise UsageError("this terminal can't run an editor") from None
        except (OSError, UnicodeDecodeError, ValueError) as e:
            raise UsageError(
                f"{editor} can't be used: {e}", hint="set EDITOR to another editor"
            ) from e
        finally:
            signal.signal(signal.SIGINT, before)
    if done:
        raise UsageError(f"{editor} ended with {done}, so the message is unchanged")
    screen.query_one(Composer).replace_text(text)


def _installed_editor() -> str:
    for editor in _EDITORS:
        if shutil.which(editor):
            return editor
    return ""


def _leave_to_editor(_number: int, _frame: FrameType | None) -> None:
    """Ignore Ctrl+C: the editor gets the signal too."""


def _words(editor: str) -> list[str]:
    if os.path.exists(editor) or os.name == "nt":
        return [editor]
    return shlex.split(editor)


async def run_in_background(_: Screen[Any], chat: ChatController, command: str) -> None:
    """/run, !COMMAND: run it concurrently with the chat, until it ends or Esc stops it."""

    async def work() -> None:
        await chat.reporting(command_actions.run_shell(chat, command))

    chat.face.run_in_background(work, "shell")
