"""The work of a screen is linear in the length of a text, whatever it contains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from markdown_it import MarkdownIt
from rich import cells

from localllm.conversation.history import History
from localllm_tui.control import formatting
from localllm_tui.screens.picking import QuestionPicker
from localllm_tui.widgets.answer import ToolFold
from localllm_tui.widgets.markdown import LONGEST_BLOCK, MarkdownRows
from localllm_tui.widgets.text import GrowingText
from tui.conftest import Driver

LINES = "x = 1\n" * 30
KINDS = [
    "word ",
    "x",
    "日本語",
    "*a",
    "`a",
    "[a](",
    "- a\n",
    "> a\n",
    "|a|b|\n",
    "\\(a",
    "line of words\n",
]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the lengths of texts that are parsed as Markdown, as blocks or as inline text."""
    lengths: list[int] = []
    for name in ("parse", "parseInline"):
        monkeypatch.setattr(MarkdownIt, name, counting(getattr(MarkdownIt, name), lengths))
    return lengths


def counting(parse: Any, lengths: list[int]) -> Any:
    def counted(self: MarkdownIt, src: str, *more: Any) -> Any:
        lengths.append(len(src))
        return parse(self, src, *more)

    return counted


def pieces(text: str, size: int) -> Iterator[str]:
    for at in range(0, len(text), size):
        yield text[at : at + size]


def shown(rows: MarkdownRows) -> list[tuple[str, bool, str]]:
    return [(row.text.plain, row.soft, row.gap) for row in rows.at(60)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_parsed_a_few_times_in_short_parts(kind: str, parsed: list[int]) -> None:
    for n_chars in (10_000, 20_000):
        parsed.clear()
        MarkdownRows((kind * n_chars)[:n_chars]).at(80)
        assert sum(parsed) < 10 * n_chars
        assert max(parsed) < 3 * LONGEST_BLOCK


@pytest.mark.parametrize(
    "text",
    [
        "one two three " * 1500,
        "a paragraph\nof short lines\n" * 800 + "\nanother one",
        "Code:\n\n```python\n" + "x = f(1)  # a comment\n" * 900 + "```\n\nand text",
        "|name|value|\n|-|-:|\n" + "|a row|17|\n" * 1500 + "\nafter it",
        "1. an item\n" * 1500,
        "日本語の文章。" * 2000,
    ],
)
def test_a_cut_block_looks_the_same_while_it_streams(text: str) -> None:
    rows = MarkdownRows()
    rows.at(60)
    for piece in pieces(text, 3_333):
        rows.add(piece)
    assert shown(rows) == shown(MarkdownRows(text))


def test_a_table_and_a_code_block_continue_after_an_internal_cut() -> None:
    table = [
        row.text.plain
        for row in MarkdownRows("|name|value|\n|-|-|\n" + "|a row|17|\n" * 1500).at(60)
    ]
    assert len(table) == 1502
    assert {row.strip() for row in table[2:]} == {"a row │ 17"}
    code = MarkdownRows("```python\n" + "value = 1\n" * 1500 + "```\n\n```\nsecond\n```\n").at(60)
    assert [row.text.plain for row in code if row.label] == ["  [1] python", "  [2]"]
    assert sum(row.text.plain == "  value = 1" for row in code) == 1500


def test_a_very_long_paragraph_is_copied_as_one_line() -> None:
    text = ("word " * 5000).strip()
    copied = ""
    for row in MarkdownRows(text).at(60):
        copied += (row.gap if row.soft else "") + row.text.plain.rstrip()
    assert copied == text


@pytest.mark.parametrize("kind", [*KINDS, f"```py\n{LINES}```\n", "a *word* and `code` "])
def test_the_garbage_collector_skips_the_rows_of_a_text(kind: str) -> None:
    rows = MarkdownRows((kind * 80_000)[:80_000])
    gc.collect()
    before = len(gc.get_objects())
    rows.at(60)
    gc.collect()
    assert len(gc.get_objects()) - before < 4_000
    assert len(rows.at(60)) > 500


@pytest.mark.parametrize(
    ("text", "begin"), [("[a](", "[a]("), ("[a](x) [b](", "[b]("), ("![a](", "![a](")]
)
def test_unterminated_addresses_are_parsed_once(text: str, begin: str) -> None:
    shown_text = "".join(row.text.plain for row in MarkdownRows(text * 900).at(60))
    assert shown_text.count(begin) == 900


@pytest.mark.parametrize("kind", KINDS)
def test_a_laid_out_text_leaves_no_work_to_the_garbage_collector(kind: str) -> None:
    gc.collect()
    gc.disable()
    try:
        MarkdownRows((kind * 8_000)[:8_000]).at(80)
        assert gc.collect() < 1_000
    finally:
        gc.enable()


def test_a_tools_long_result_is_laid_out_in_one_widget_over_time(
    drive: Any, history: History
) -> None:
    conv_id = history.create("long", "scripted")
    history.append(conv_id, "user", "read it")
    ran = {
        "name": "read",
        "arguments": "x" * 50_000,
        "result": "a line\n" * 20_000,
        "allowed": True,
    }
    history.append(conv_id, "assistant", "done", meta={"tools": [ran]})

    async def play(d: Driver) -> None:
        await d.press("ctrl+t")
        text = d.app.screen.query_one(ToolFold).query_one(GrowingText)
        await d.until(lambda: text.rows.complete)
        await d.until(lambda: text.size.height > 20_000)

    drive(play, resume=conv_id)


def test_a_hit_far_into_a_long_answer_is_shown(drive: Any, history: History) -> None:
    conv_id = history.create("long", "scripted")
    history.append(conv_id, "user", "go on")
    history.append(conv_id, "assistant", "some words in a line\n\n" * 2_500 + "the needle")

    async def play(d: Driver) -> None:
        await d.press("ctrl+f", *"needle")
        await d.until(lambda: "1 turn" in d.screen())
        await d.press("enter")
        await d.until(lambda: "the needle" in d.screen() and "turn 1 of 1" in d.screen())

    drive(play, resume=conv_id)


def test_eliding_counts_each_character_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def cell_len(text: str) -> int:
        counted.append(len(text))
        return cells.cell_len(text)

    monkeypatch.setattr(formatting, "cell_len", cell_len)
    for text in ("word " * 40_000, "日本" * 100_000, "e\u0301" * 100_000):
        counted.clear()
        assert formatting.elide(text, 60).endswith("…")
        assert sum(counted) < 2 * len(text)
    counted.clear()
    formatting.fitted("a hint · " * 20_000, 60)
    assert sum(counted) < 400_000


def test_a_question_of_20000_lines_does_not_block_the_screen(drive: Any, history: History) -> None:
    question = "some words in a line\n" * 20_000
    conv_id = history.create("long", "scripted")
    history.append(conv_id, "user", question)

    rows = MarkdownRows(question, plain=True)
    rows.so_far(80)
    assert not rows.complete  # the rest is laid out between keys

    async def play(d: Driver) -> None:
        text = d.app.page.transcript.query(GrowingText).first()
        await d.press("ctrl+r")
        await d.until(lambda: isinstance(d.app.screen, QuestionPicker))
        assert "some words in a line some words" in d.screen()
        await d.press("escape", "ctrl+o")
        await d.until(lambda: "1 conversation" in d.screen())
        await d.press("escape")
        await d.until(lambda: text.rows.complete)
        assert text.size.height >= 20_000

    drive(play, resume=conv_id)
