"""Keys, mouse wheel and paste as in other programs, and names that are too long for a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.events import MouseScrollUp

from localllm.conversation.history import History
from localllm_tui.control.answering import PendingAnswer
from localllm_tui.control.client import without_body_positions
from localllm_tui.control.interfaces import EngineProgress
from localllm_tui.control.meter import status_text
from localllm_tui.control.session import Session
from localllm_tui.line_chat import WrappedLines
from localllm_tui.screens.models import ModelsScreen
from tui.conftest import Driver
from tui.scripted_models import ScriptedModelService, choice
from tui.scripted_sse import ScriptedServer
from tui.test_images import PIXEL


@pytest.mark.parametrize("key", ["ctrl+o", "at", "f4", "ctrl+f"])
def test_the_cursor_of_every_list_is_visible_without_colours(
    drive: Any, history: History, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alpha.txt").write_text("a")
    session = Session(history, "scripted")
    session.ask("alpha")

    async def play(d: Driver) -> None:
        await d.press(key)
        await d.until(lambda: "alpha" in d.reversed().lower())
        assert "beta" not in d.reversed().lower()

    drive(
        play, resume=session.id, model_service=ScriptedModelService(choice("alpha"), choice("beta"))
    )


def test_a_typed_machine_name_is_shown(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("f4")
        await d.until(
            lambda: (
                isinstance(d.app.screen, ModelsScreen) and bool(d.app.screen.rows.planned.choices)
            )
        )
        await d.press("m", *"rtx")
        await d.until(lambda: "rtx" in d.screen())
        await d.press("enter")
        await d.until(lambda: d.app.focused is not None and d.app.focused.id != "typed")
        await d.until(lambda: "‹ rtx ›" in d.screen())

    drive(play, model_service=ScriptedModelService(choice("alpha"), choice("beta")))


def counted_exits(d: Driver) -> list[str]:
    """Replace the chat's exit by a record of each attempt."""
    left: list[str] = []

    async def leave() -> None:
        left.append("left")

    d.app.chat.leave = leave
    return left


def test_ctrl_d_in_a_text_removes_and_in_an_empty_input_quits(drive: Any) -> None:
    async def play(d: Driver) -> None:
        left = counted_exits(d)
        await d.type("abc")
        await d.press("home", "ctrl+d")
        assert d.app.page.composer.text == "bc"
        await d.press("ctrl+o", "x", "home", "ctrl+d")
        assert left == []
        await d.press("escape", "ctrl+d", "ctrl+d")
        assert left == []
        await d.press("ctrl+d")
        assert left == ["left"]

    drive(play)


def test_ctrl_c_clears_then_quits_on_the_second(drive: Any) -> None:
    async def play(d: Driver) -> None:
        left = counted_exits(d)
        await d.type("a question")
        await d.press("ctrl+c")
        assert d.app.page.composer.text == ""
        await d.press("ctrl+z")
        assert d.app.page.composer.text == "a question"
        await d.press("ctrl+c", "ctrl+c")
        assert left == []
        await d.press("ctrl+c")
        assert left == ["left"]

    drive(play)


def test_the_wheel_loads_earlier_turns_up_to_the_first(drive: Any, history: History) -> None:
    session = Session(history, "scripted")
    for n in range(26):
        session.ask(f"turn {n}.")
        answer = PendingAnswer(session)
        answer.add(f"answer {n}")
        answer.finish({"finish_reason": "stop"})

    async def play(d: Driver) -> None:
        transcript = d.app.page.transcript
        await d.until(lambda: transcript.max_scroll_y > 0)

        def turned() -> bool:
            transcript.post_message(MouseScrollUp(transcript, 5, 5, 0, -1, 0, False, False, False))
            return "answer 0" in d.screen()

        await d.until(turned)
        assert len(transcript.views) == 52

    drive(play, resume=session.id)


def test_an_unsupported_image_is_refused_when_it_is_attached(drive: Any, tmp_path: Path) -> None:
    (tmp_path / "shot.png").write_bytes(PIXEL)

    async def refuse(*_: Any) -> tuple[None, str]:
        return None, without_body_positions(
            "messages[0].content[0]: this model does not support images"
        )

    async def play(d: Driver) -> None:
        d.app.chat.client.counted = refuse
        await d.send(f"/attach {tmp_path / 'shot.png'}")
        await d.until(lambda: "does not support images" in " ".join(d.screen().split()))
        assert "messages[" not in d.screen()
        assert d.app.chat.attached == []

    drive(play)


def test_errors_are_shown_without_positions_in_the_request() -> None:
    for spot in (
        "messages[2].content[0]",
        "messages.2.content.0.image_url",
        "input[0].content[1].text",
    ):
        assert (
            without_body_positions(f"{spot}: this model has no vision")
            == "this model has no vision"
        )
    assert without_body_positions("it has 3 messages: too many") == "it has 3 messages: too many"


class Loading:
    """An engine whose load is half complete."""

    model, api_key, unix_socket, where, ours = "scripted", None, "", "", True

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def progress(self) -> EngineProgress:
        return EngineProgress("loading", 0.5)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_panel_shows_the_loading_progress_while_the_model_loads(
    drive: Any, server: ScriptedServer, columns: int
) -> None:
    async def play(d: Driver) -> None:
        await d.press("f3")
        await d.until(lambda: "Still loading scripted 50%" in d.screen())
        assert "does not report" not in d.screen()

    drive(play, engine=Loading(server.base_url), size=(columns, 24))


def test_the_hints_of_find_match_its_keys(drive: Any, history: History) -> None:
    session = Session(history, "scripted")
    session.ask("alpha")

    async def play(d: Driver) -> None:
        await d.press("ctrl+f")
        await d.until(lambda: "goes there" in d.screen())
        assert "removes" not in d.screen()

    drive(play, resume=session.id)


def test_a_key_without_effect_shows_the_reason(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("f2")
        await d.until(lambda: "the conversation has no turn" in d.screen())

    drive(play, toasts=True)


def test_a_name_with_line_breaks_is_shown_on_one_line(drive: Any, history: History) -> None:
    evil = "first\nsecond\r\n third"
    assert "\n" not in status_text(60, evil, 0, None, {})

    async def play(d: Driver) -> None:
        assert "first second third" in d.screen()
        for row in ("╭─ message", "╰──"):
            assert row in d.screen()

    session = Session(history, evil)
    session.ask("alpha")
    session.rename(evil)
    drive(play)


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
def test_lines_are_wrapped_between_words_with_any_division_of_the_text(cut: int) -> None:
    text = (
        "some words of a text, 日本語 日本語 日本語 and a-very-long-word-without-any-space-in-it here\n\n  "
        "indented\n"
    )
    lines = WrappedLines(20)
    said = "".join(lines.add(text[i : i + cut]) for i in range(0, len(text), cut)) + lines.end()
    assert "".join(said.split()) == "".join(text.split())
    assert all(cell_len(line) <= 20 or "a-very-long" in line for line in said.splitlines())
    assert said.endswith("\n\n  indented\n")
    assert WrappedLines(0).add(text) == text


def test_a_slash_offers_commands_that_arrows_choose_and_enter_runs(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.press("slash")
        await d.until(lambda: "start a new conversation" in d.screen())
        await d.press("z")
        assert not d.app.page.composer.menu.display  # no command has this name
        await d.press("ctrl+c", *"/ampl")
        await d.until(
            lambda: "show or set the sampling" in d.screen()
        )  # a part of the name is enough
        await d.press("tab")
        assert d.app.page.composer.text == "/sampling "
        await d.press("ctrl+c", "slash", "t", "down", "enter")
        await d.until(lambda: d.app.page.composer.text == "")
        await d.press(*"/att", "enter")
        assert d.app.page.composer.text == "/attach "  # the command needs a file

    drive(play)
