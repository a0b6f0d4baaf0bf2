"""Colours, themes, pictures and toasts suit the terminal and do not disturb the user."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from rich.segment import Segment

from localllm_tui.widgets.line_filters import NoControls
from tui.conftest import Driver
from tui.scripted_sse import ScriptedServer


def test_no_color_removes_every_colour(
    drive: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    server.answer("**bold** and `code`\n```py\nx = 1\n```")

    async def play(d: Driver) -> None:
        def styles() -> list[Any]:
            lines = [d.app.screen._compositor.render_strips()]
            filters = d.app.get_line_filters()
            shown: list[Segment] = []
            for strip in lines[0]:
                for line_filter in filters:
                    strip = strip.apply_filter(line_filter, d.app.screen.styles.background)
                shown += list(strip)
            return [s.style for s in shown if s.style is not None]

        await d.ask("q")
        await d.type("typed")
        assert all(style.color is None and style.bgcolor is None for style in styles())
        assert any(style.reverse for style in styles())  # the cursor is still visible
        await d.press("f1")
        assert all(style.color is None and style.bgcolor is None for style in styles())

    drive(play)


def test_a_key_filters_only_the_lines_that_it_changes(
    drive: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other lines of the screen keep what the filters made of them before."""
    server.answer("a line\n\n" * 40)
    filtered: list[str] = []
    apply = NoControls.apply

    def counted(self: NoControls, segments: list[Segment], background: Any) -> list[Segment]:
        filtered.append("".join(segment.text for segment in segments))
        return apply(self, segments, background)

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.press("a")
        monkeypatch.setattr(NoControls, "apply", counted)
        await d.press("b")
        await d.until(lambda: any("ab" in line for line in filtered))
        assert len(filtered) < 10  # the lines of the input
        assert not any("a line" in line for line in filtered)

    drive(play, size=(80, 40))


def test_a_theme_is_remembered(drive: Any) -> None:
    async def first(d: Driver) -> None:
        d.app.theme = "gruvbox"
        await d.pilot.pause()

    async def second(d: Driver) -> None:
        assert d.app.theme == "gruvbox"

    drive(first)
    drive(second)


def test_an_unknown_theme_or_a_damaged_settings_file_is_ignored(drive: Any, tmp_path: Path) -> None:
    async def play(d: Driver) -> None:
        assert d.app.theme == "textual-dark"

    for said in ('{"theme": "no such"}', "[]", "not json", '{"theme": 7}'):
        (tmp_path / "chat.json").write_text(said)
        drive(play)


def test_toasts_do_not_cover_the_input(drive: Any, server: ScriptedServer) -> None:
    server.answer("ok")

    async def play(d: Driver) -> None:
        await d.ask("q")
        await d.send("/copy")
        await d.until(lambda: "copied the answer" in d.screen())
        toast = next(
            n for n, line in enumerate(d.screen().splitlines()) if "copied the answer" in line
        )
        assert toast < d.app.page.composer.region.y - 3

    drive(play, toasts=True)


def test_garbage_collection_is_off_during_the_start_and_on_in_the_chat(drive: Any) -> None:
    async def play(d: Driver) -> None:
        await d.until(gc.isenabled)

    gc.disable()  # like the command
    try:
        assert not gc.isenabled()
        drive(play)
        assert gc.isenabled()
    finally:
        gc.enable()
