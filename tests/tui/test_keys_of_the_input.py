"""Keys of the input: whole characters, earlier questions, an external editor, and suspension."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.widgets import Input, OptionList

from localllm.conversation.history import History
from localllm_tui.control.session import Session
from localllm_tui.screens.picking import QuestionPicker
from support.until import until
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer
from tui.test_chat_command import Terminal, drafts, pty, terminal

__all__ = ["terminal"]

# One character of each kind. The long tests try all others.
KINDS = ["a", "e\u0301", "👩‍👩‍👧‍👦", "🇩🇪", "각", "नि"]
OTHERS = ["é", "o\u0302\u0323", "👍🏽", "1️⃣", "❤️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "กำ", "日", "🏳️‍🌈"]


@pytest.mark.parametrize(
    "characters", [KINDS, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["kinds", "others"]
)
def test_backspace_delete_and_arrows_treat_a_visible_character_as_one(
    drive: Any, characters: list[str]
) -> None:
    async def play(d: Driver) -> None:
        box = d.app.page.composer
        for alone in characters:
            await d.type(f"x{alone}y\nz{alone}")
            await d.press("backspace")
            assert box.text == f"x{alone}y\nz", alone
            await d.press("backspace", "backspace", "backspace", "backspace")
            assert box.text == "x", alone
            await d.type(f"{alone}y")
            await d.press("left", "left")
            assert box.cursor_location == (0, 1), alone
            await d.press("delete")
            assert box.text == "xy", alone
            box.replace_text("")

    drive(play)


def test_enter_takes_the_typed_text_and_not_an_earlier_suggestion(
    drive: Any, server: ScriptedServer
) -> None:
    server.answer("hello")

    async def play(d: Driver) -> None:
        await d.type("/comp")
        await d.until(lambda: d.app.page.composer.menu.display)
        for key in ("ctrl+u", "h", "i", "enter"):  # faster than the menu updates
            d.app.post_message(events.Key(key, key if len(key) == 1 else None))
        await d.until(lambda: bool(server.requests) or "nothing to compare" in d.screen())
        assert "nothing to compare" not in d.screen()
        assert server.requests[0]["messages"][-1]["content"] == "hi"

    drive(play)


EDITS = {
    "backspace": "ac",
    "delete": "abc",
    "left": "acb",
    "home": "cab",
    "ctrl+u": "c",
    "ctrl+w": "c",
    "ctrl+j": "ab\nc",
    "end": "abc",
}


@pytest.mark.parametrize("where", ["composer", "search"])
def test_keys_are_handled_in_the_order_in_which_they_are_typed(drive: Any, where: str) -> None:
    """Keys are handled in order at any speed, even if all arrive before the first is handled."""

    async def play(d: Driver) -> None:
        box: Any = d.app.page.composer
        if where == "search":
            await d.press("ctrl+r")
            box = d.app.screen.query_one(Input)

        def said() -> str:
            return str(box.text if where == "composer" else box.value)

        for key, wanted in EDITS.items():
            for name in ("a", "b", key, "c"):
                d.app.post_message(events.Key(name, name if len(name) == 1 else None))
            await d.until(lambda: "c" in said())
            await d.pilot.pause()
            assert said() == (wanted if where == "composer" else wanted.replace("\n", "")), key
            box.clear()

    drive(play)


def test_backspace_removes_flags_one_by_one(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.type("🇩🇪🇫🇷🇯🇵")
        for left in ("🇩🇪🇫🇷", "🇩🇪", ""):
            await d.press("backspace")
            assert d.app.page.composer.text == left

    drive(play)


def test_ctrl_r_recalls_a_question_of_any_conversation(drive: Any, history: History) -> None:
    for title, asked in (
        ("one", ["what is a lighthouse?", "and a buoy?"]),
        ("two", ["why is the sky blue?"]),
    ):
        session = Session(history, "scripted")
        for question in asked:
            session.ask(
                question,
                [(f"{title}.txt", "lighthouse words in a file")]
                if question.startswith("why")
                else (),
            )
    assert [*history.typed_questions()] == [
        "why is the sky blue?",
        "and a buoy?",
        "what is a lighthouse?",
    ]
    # the typed text, without attachments
    assert [*history.typed_questions("LIGHTHOUSE")] == ["what is a lighthouse?"]
    assert [*history.typed_questions(limit=1)] == ["why is the sky blue?"]

    async def play(d: Driver) -> None:
        await d.press("ctrl+r")
        await d.until(lambda: "3 questions" in d.screen())
        await d.press("ctrl+r", "down", "up", "enter")
        await d.until(lambda: d.app.page.composer.text == "and a buoy?")
        await d.press("ctrl+c", *"ligh", "ctrl+r")
        await d.until(
            lambda: (
                isinstance(d.app.screen, QuestionPicker)
                and d.app.screen.query_one(OptionList).option_count == 1
            )
        )
        await d.press("enter")
        await d.until(lambda: d.app.page.composer.text == "what is a lighthouse?")
        await d.press("ctrl+r", "escape")
        assert d.app.page.composer.text == "what is a lighthouse?"

    drive(play)


def editor(folder: Path, does: str) -> str:
    """Return a program that acts as an editor."""
    file = folder / "an editor.sh"
    file.write_text(f"#!/bin/sh\n{does}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pty
def test_ctrl_g_writes_the_message_in_an_editor(
    server: ScriptedServer, terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    server.answer("Bonjour")
    chat = terminal(
        EDITOR=editor(
            tmp_path, 'echo "the editor has it: $(cat "$1")"; printf "second\\nthird\\n" >> "$1"'
        ),
        VISUAL="",
    )
    chat.until("Enter sends")
    chat.type("first \x07")
    chat.until("the editor has it: first ")
    chat.until("third")
    chat.type("\r")
    chat.until("Bonjour")
    chat.type("\x11")
    assert chat.rest() == 0
    assert server.requests[0]["messages"][-1]["content"] == "first second\nthird"


@pty
@pytest.mark.parametrize("does", ["exit 3", 'printf "\\377" > "$1"'])
def test_an_editor_that_fails_leaves_the_message_as_it_was(
    terminal: Callable[..., Terminal], tmp_path: Path, does: str
) -> None:
    chat = terminal(VISUAL=editor(tmp_path, does))
    chat.until("Enter sends")
    chat.type("precious\x07")
    chat.until("Error:")
    chat.type("\x11")
    assert chat.rest() == 0
    again = terminal()
    again.until("precious")
    again.type("\x03\x11")
    assert again.rest() == 0


@pty
@pytest.mark.parametrize("sleep", [signal.SIGTSTP, signal.SIGSTOP])
def test_a_resumed_chat_is_drawn_again(
    terminal: Callable[..., Terminal], sleep: signal.Signals
) -> None:
    chat = terminal()
    chat.until("Enter sends")
    chat.type("half a question")
    until(lambda: "half a question" in drafts(), "what is typed is not taken")
    os.kill(chat.child.pid, sleep)
    _, status = os.waitpid(chat.child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    if sleep == signal.SIGTSTP:
        chat.until("\x1b[?1049l")  # the shell's screen is restored
    chat.seen = b""
    os.kill(chat.child.pid, signal.SIGCONT)
    chat.until("\x1b[?1049h")
    chat.seen = chat.seen.partition(b"\x1b[?1049h")[2]
    chat.until("half a question")
    chat.until("Enter sends")
    chat.type(" more")
    until(lambda: "half a question more" in drafts(), "what is typed then is not taken")
    chat.type("\x11")
    assert chat.rest() == 0


@pty
def test_a_control_key_waits_for_the_text_typed_before_it(
    server: ScriptedServer, terminal: Callable[..., Terminal]
) -> None:
    server.answer("Bonjour")
    chat = terminal()
    chat.until("Enter sends")
    chat.type("typed at once\x04\x03still here\r")  # only Ctrl+C clears a text
    chat.until("Bonjour")
    chat.type("\x11")
    assert chat.rest() == 0
    assert server.requests[0]["messages"][-1]["content"] == "still here"
