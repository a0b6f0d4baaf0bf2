"""Work that runs concurrently with the screen and ends with it, !COMMAND, and the editor of $VISUAL
or $EDITOR, which gets the terminal meanwhile."""

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
    what: Callable[[], Coroutine[None, None, None]],
    group: str,
    *,
    exclusive: bool = True,
    exit_on_error: bool = False,
) -> Worker[None]:
    """Run `what` while `node` exists; `exclusive`: in place of other work of its group. An error
    ends only this work, unless `exit_on_error`.

    Takes the function, not its coroutine: Python would warn of a coroutine that an exit prevents
    from starting.
    """
    return node.run_worker(what, group=group, exclusive=exclusive, exit_on_error=exit_on_error)


# If neither variable is set: the first of these that is installed.
_EDITORS = ("notepad",) if os.name == "nt" else ("sensible-editor", "nano", "vi")


async def open_editor(screen: Screen[Any], chat: ChatController, _: str) -> None:
    """/editor, Ctrl+G: open the message in the editor; the saved text becomes the input. Raises
    UsageError if there is no editor."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or _installed_editor()
    if not editor:
        raise UsageError(
            "no editor is known here", hint="set EDITOR, for example: export EDITOR=nano"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "message.md"
        file.write_text(screen.query_one(Composer).text, encoding="utf-8")
        # Ctrl+C is the editor's meanwhile. A handler, for to ignore a signal is inherited.
        before = signal.signal(signal.SIGINT, _leave_to_editor)
        try:
            with screen.app.suspend():
                done = subprocess.run([*_words(editor), str(file)]).returncode
            text = file.read_text(encoding="utf-8").rstrip("\n")
        except SuspendNotSupported:
            raise UsageError("this terminal can't be lent to an editor") from None
        except (OSError, UnicodeDecodeError, ValueError) as e:
            raise UsageError(f"{editor} can't be used: {e}", hint="set EDITOR to another") from e
        finally:
            signal.signal(signal.SIGINT, before)
    if done:
        raise UsageError(f"{editor} ended with {done}: the message is as it was")
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


async def run_beside(_: Screen[Any], chat: ChatController, command: str) -> None:
    """/run, !COMMAND: run it concurrently with the chat, until it ends or Esc stops it."""

    async def work() -> None:
        await chat.reporting(command_actions.run_shell(chat, command))

    chat.face.run_beside(work, "shell")
