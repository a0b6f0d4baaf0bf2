"""A long answer: drawn in parts, of which those far off the screen cost nothing, and all of it is there when one looks."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chat_frames import words
from localllm_tui.widgets import parts
from localllm_tui.widgets.parts import PART_BLOCKS, AnswerText, in_parts
from tui.conftest import Driver
from tui.scripted_sse import Finish, Say, ScriptedServer


def laid_out(text: AnswerText) -> int:
    """The blocks that the layout looks at."""
    return sum(block.display for part in text.parts for block in part.children)


def test_parts_far_from_the_screen_are_folded_and_come_back(drive: Any, server: ScriptedServer) -> None:
    server.play(Say([*list(words(1500)), "\n\nthe very end"]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("go on")
        await d.until(lambda: "the very end" in d.screen())
        text = d.app.screen.query_one(AnswerText)
        assert "".join(words(1500)).startswith("\n\n## Section 1")
        blocks = sum(len(part.children) for part in text.parts)
        assert blocks > 3 * PART_BLOCKS
        await d.until(lambda: laid_out(text) < blocks)
        height = d.app.transcript.virtual_size.height
        seen: list[str] = []
        while d.app.transcript.scroll_y > 0:
            await d.press("pageup")
            await d.until(lambda: d.app.transcript.scroll_y == d.app.transcript.scroll_target_y)
            seen += [line.strip() for line in d.screen().splitlines()]
            assert laid_out(text) < blocks
        assert d.app.transcript.virtual_size.height == height  # nothing jumps
        for n in range(1, 5):
            assert any(f"Section {n}" in line for line in seen), n
        assert any(line.endswith("go on") for line in seen)
        await d.pilot.resize_terminal(100, 30)
        await d.until(lambda: laid_out(text) < blocks)
        await d.press(*["pagedown"] * 60)
        await d.until(lambda: "the very end" in d.screen())

    drive(play)


def test_a_text_in_parts_looks_like_the_text_in_one(
    drive: Any, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "".join(words(700))
    server.play(Say([said[i : i + 7] for i in range(0, len(said), 7)]), Finish())

    async def play(d: Driver) -> None:
        def answer() -> list[str]:
            lines = [line.rstrip(" ▁▂▃▄▅▆▇█") for line in d.screen().splitlines()]
            return (
                "\n".join(lines[next(n for n, line in enumerate(lines) if "Section 1" in line) : -6])
                .rstrip()
                .splitlines()
            )

        await d.ask("go on")
        d.app.transcript.release()
        d.app.transcript.scroll_home(animate=False)
        await d.until(lambda: "Section 1" in d.screen())
        streamed = answer()
        assert len(d.app.screen.query_one(AnswerText).parts) > 1
        monkeypatch.setattr(parts, "SHORT_CHARS", len(said) + 1)
        await d.app.chat.open(type(d.app.session)(d.app.session.history, "m", conv_id=d.app.session.id))
        await d.until(lambda: len(d.app.screen.query(AnswerText)) == 1)
        d.app.transcript.release()
        d.app.transcript.scroll_home(animate=False)
        await d.until(lambda: "Section 1" in d.screen())
        assert len(d.app.screen.query_one(AnswerText).parts) == 1
        await d.until(lambda: answer() == streamed)

    drive(play, size=(100, 160))


def test_a_stored_long_answer_opens_in_parts_and_looks_as_it_did(drive: Any, server: ScriptedServer) -> None:
    said = "".join(words(1500)) + "\n\nthe very end"
    server.play(Say([said]), Finish())

    async def play(d: Driver) -> None:
        await d.ask("go on")
        await d.until(lambda: "the very end" in d.screen())
        shown, height = d.screen(), d.app.transcript.virtual_size.height
        await d.app.chat.open(type(d.app.session)(d.app.session.history, "m", conv_id=d.app.session.id))
        await d.until(lambda: len(d.app.screen.query(AnswerText)) == 1)
        text = d.app.screen.query_one(AnswerText)
        await d.until(lambda: "the very end" in d.screen())
        blocks = sum(len(part.children) for part in text.parts)
        assert blocks > 3 * PART_BLOCKS
        await d.until(lambda: laid_out(text) < blocks)
        await d.until(lambda: d.app.transcript.virtual_size.height == height)
        assert d.screen() == shown
        assert text.parts[-1].source.endswith("the very end")
        assert "".join(part.source for part in text.parts) == said

    drive(play)


def test_a_text_is_cut_between_blocks_and_loses_nothing() -> None:
    said = "".join(words(1500))
    assert "".join(in_parts(said)) == said
    assert all(part.count("```") % 2 == 0 for part in in_parts(said))
    linked = said + "\n\nsee [there][1]\n\n[1]: https://example.org\n"
    assert in_parts(linked) == [linked]
