"""Colours: every text is readable in every theme, and light terminals are recognised.

With sixteen colours, the chat uses the terminal's own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from localllm.plain_output import only_plain
from localllm_tui.control.formatting import fitted
from localllm_tui.control.terminal import ask_background, is_light
from localllm_tui.widgets.code import STYLES, highlighted, palette
from localllm_tui.widgets.contrast import READABLE, contrast, readable, readable_tokens
from tui.conftest import Driver

NAMED = [name for name, theme in BUILTIN_THEMES.items() if not theme.ansi]


@pytest.mark.parametrize("name", NAMED)
def test_every_text_is_readable_in_every_theme(name: str) -> None:
    theme = BUILTIN_THEMES[name].to_color_system().generate()
    variables = {**theme, **readable_tokens(theme)}
    grounds = [Color.parse(variables[ground]) for ground in ("background", "surface")]
    for token in ("hint", "accent-text"):
        assert (
            min(contrast(Color.parse(variables[token]), ground) for ground in grounds) >= READABLE
        ), token
    look = palette(variables)
    block = look.get_style("code.block").bgcolor
    assert block is not None
    for style in STYLES:
        seen = look.get_style(style)
        if seen.color is not None:
            behind = seen.bgcolor or (block if style.startswith("code.") else grounds[0].rich_color)
            assert (
                contrast(Color.from_rich_color(seen.color), Color.from_rich_color(behind))
                >= READABLE
            ), style


def test_a_colour_is_changed_only_until_it_is_readable() -> None:
    black, white = Color(0, 0, 0), Color(255, 255, 255)
    assert contrast(black, white) == pytest.approx(21)
    assert readable(white, (black,)) == white
    assert READABLE <= contrast(readable(Color(90, 90, 90), (black,)), black) < READABLE + 1


@pytest.mark.parametrize(
    ("said", "light"),
    [
        ("\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?64;1;2c", True),
        ("\x1b]11;rgb:1e1e/1e1e/2e2e\x07", False),
        ("\x1b]11;rgb:fd/f6/e3\x07", True),
        ("\x1b[?1;2c", False),
        ("", False),
        ("\x1b]11;rgb:zz/00/00\x07", False),
    ],
)
def test_a_light_terminal_is_recognised_by_its_answer(said: str, light: bool) -> None:
    assert is_light(said) is light


def test_the_terminals_background_is_queried_while_the_start_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The terminal's background colour is queried while the start continues.

    The query is written although the output of commands is filtered. Keys that are typed
    meanwhile are kept, and not echoed.
    """
    termios = pytest.importorskip("termios")
    master, slave = os.openpty()
    before = termios.tcgetattr(slave)
    with (
        open(slave, encoding="utf-8", closefd=False) as keyboard,
        open(slave, "w", encoding="utf-8") as screen,
    ):
        monkeypatch.setattr(sys, "__stdin__", keyboard)
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("TERM", "xterm")
        with only_plain():
            question = ask_background()
            assert os.read(master, 100) == b"\x1b]11;?\x07\x1b[c"
            keys = b"\x1bOS\x1b[1;5A\x1b[15~"  # F4, Ctrl+Up, F5
            os.write(master, b"hek\x7fl" + keys + b"\x1b]11;rgb:ffff/ffff/ffff\x07lo\x1b[?62;c")
            said, typed = question.answer()
        assert (is_light(said), typed) == (True, "hello")
        assert question.answer() == (said, typed)
        assert termios.tcgetattr(slave) == before
    os.close(master)


def test_a_terminal_of_sixteen_colours_keeps_its_own_colours(
    drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLORTERM", raising=False)

    async def play(d: Driver) -> None:
        assert d.app.theme == "ansi-dark"
        assert d.app.fitting_theme(light=True) == "ansi-light"
        assert "Enter sends" in d.screen()

    drive(play)


def test_prose_is_limited_in_width_on_a_wide_screen(drive: Any, server: Any) -> None:
    server.answer("word " * 100)

    async def play(d: Driver) -> None:
        await d.ask("question " * 60)
        lines = [
            line
            for line in d.screen().splitlines()
            if "word word" in line or "question question" in line
        ]
        assert len(lines) > 4
        assert max(len(line.rstrip()) for line in lines) <= 106

    drive(play, size=(200, 60))


def test_a_code_block_has_a_number_and_a_click_copies_it(drive: Any, server: Any) -> None:
    copied: list[str] = []
    server.answer(
        "first\n\n```python\nx = 1\n```\n\n- [ ] open\n- [x] done\n\n  ```sh\n  ls\n  ```\n"
    )

    async def play(d: Driver) -> None:
        await d.ask("code?")
        lines = d.screen().splitlines()
        assert any(line.strip(" │▌▏┃").endswith("[1] python") for line in lines)
        assert "☐ open" in d.screen()
        assert "☑ done" in d.screen()
        at = next(y for y, line in enumerate(lines) if "[2] sh" in line)
        await d.pilot.click(offset=(lines[at].index("[2]"), at))
        await d.until(lambda: copied == ["ls"])

    drive(play, copy=lambda text: bool(copied.append(text)) or True)


def test_lines_of_a_diff_have_background_tints() -> None:
    theme = BUILTIN_THEMES["textual-dark"].to_color_system().generate()
    look = palette({**theme, **readable_tokens(theme)})
    grounds = {look.get_style(f"code.Generic.{kind}").bgcolor for kind in ("Inserted", "Deleted")}
    assert len(grounds) == 2
    assert look.get_style("code.block").bgcolor not in grounds
    lines = highlighted("-gone\n+come", "diff").split("\n")
    assert [str(line.spans[0].style) for line in lines] == [
        "code.Generic.Deleted",
        "code.Generic.Inserted",
    ]


@pytest.mark.parametrize("cells", [0, 5, 12, 20, 30, 200])
def test_hints_that_do_not_fit_are_left_out_completely_except_the_last(cells: int) -> None:
    hints = "Enter sends · Ctrl+J new line · F2 turns · F1 help"
    shown = fitted(hints, cells)
    assert len(shown) <= cells
    assert cells < 7 or shown.endswith("F1 help")
    assert cells < 7 or set(shown.split(" · ")) <= set(hints.split(" · "))


def test_a_marker_shows_that_there_is_text_below_the_screen(drive: Any, server: Any) -> None:
    server.answer("\n\n".join(f"line {n}" for n in range(60)))

    async def play(d: Driver) -> None:
        await d.ask("many?")
        await d.until(lambda: "line 59" in d.screen() and "more below" not in d.screen())
        await d.press("pageup")
        await d.until(lambda: "↓ more below" in d.screen())
        await d.press("pagedown")
        await d.until(lambda: "more below" not in d.screen())

    drive(play)


def test_the_head_line_names_the_conversation_and_its_version(drive: Any, server: Any) -> None:
    server.answer("one")
    server.answer("two")

    async def play(d: Driver) -> None:
        await d.ask("why is the sky blue?")
        await d.ask("/retry")
        await d.until(lambda: "version 2 of 2" in d.screen().splitlines()[0])
        assert "why is the sky blue?" in d.screen().splitlines()[0]

    drive(play)


@pytest.mark.parametrize("columns", [40, 120])
def test_a_fact_in_the_head_line_is_shown_completely_or_left_out(
    drive: Any, server: Any, columns: int
) -> None:
    server.models = [{"id": "scripted", "object": "model", "sampling": {"temperature": 0.7}}]
    server.answer("one")

    async def play(d: Driver) -> None:
        await d.ask("why is the sky blue, and the sea?")
        head = d.screen().splitlines()[0]
        assert ("balanced (temperature 0.7)" in head) is (columns == 120)
        assert ("balanced" in head) is (columns == 120)

    drive(play, size=(columns, 30))
