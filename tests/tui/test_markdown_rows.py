"""Markdown as rows.

The rows are the same for every division into pieces and complete at every width. Finished rows
are not laid out again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from localllm_tui.widgets import markdown
from localllm_tui.widgets.markdown import PROSE_CELLS, MarkdownRows
from support.examples import examples
from support.long_markdown import words

PIECES = (
    "# Head\n", "## Two\n\n", "plain words and more of them ", "**bold** ", "`code` ", "*it*", "\n",
    "\n\n", "- item\n",
    "  - inner\n", "1. first\n", "\n   more\n", "> said\n", "```python\n", "x = 1\n", "```\n",
    "| a | b |\n|---|---|\n",
    "| 1 | 2 |\n", "-", "\n-", "1.", ">", "---\n", "    indented\n", "<b>html</b>\n",
    "[a](http://x) ", "日本語 ", "===\n",
    "~~gone~~", "![i](u)", "$x^2$ ", "$$", "\\[", "\\] ", "a = b\n", "costs $5 ", "<details>\n",
    "<summary>More</summary>\n",
    "</details>\n",
)  # fmt: skip


def shown(rows: MarkdownRows, width: int = 40) -> str:
    return "\n".join(row.text.plain.rstrip() for row in rows.at(width))


@given(st.lists(st.sampled_from(PIECES), max_size=25), st.integers(1, 60))
# an empty quote has no rows, so it needs no space around it
@example([">", "\n", "# Head\n", "# Head\n"], 40)
@settings(max_examples=examples(300))
def test_text_added_in_pieces_has_the_same_rows_as_the_complete_text(
    pieces: list[str], width: int
) -> None:
    grown = MarkdownRows()
    grown.at(width)
    for piece in pieces:
        grown.add(piece)
    whole = MarkdownRows("".join(pieces))
    assert [(r.text, r.soft, r.lead, r.fill) for r in grown.at(width)] == [
        (r.text, r.soft, r.lead, r.fill) for r in whole.at(width)
    ]


@given(st.lists(st.sampled_from(PIECES), max_size=25), st.integers(30, 60))
@settings(max_examples=examples(200))
def test_no_row_is_wider_than_the_screen(pieces: list[str], width: int) -> None:
    assert all(cell_len(row.text.plain) <= width for row in MarkdownRows("".join(pieces)).at(width))


@pytest.mark.parametrize("plain", [False, True])
def test_the_rows_laid_out_per_frame_do_not_grow_with_the_text(plain: bool) -> None:
    said = list(words(20_000))

    def anew(before: int) -> int:
        """Return the most rows that one piece lays out again after `before` pieces."""
        rows = MarkdownRows("".join(said[:before]), plain=plain)
        rows.at(100)
        most = 0
        for piece in said[before : before + 400]:
            finished = rows.finished
            rows.add(piece)
            most = max(most, len(rows.at(100)) - finished)
        return most

    assert anew(19_000) <= anew(200) + 1


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.data())
@settings(max_examples=examples(300))
def test_text_divided_anywhere_has_the_same_rows(pieces: list[str], data: st.DataObject) -> None:
    said = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), max_size=8)))
    grown = MarkdownRows()
    grown.at(40)
    for start, end in itertools.pairwise([0, *cuts, len(said)]):
        grown.add(said[start:end])
    assert [(r.text, r.soft) for r in grown.at(40)] == [
        (r.text, r.soft) for r in MarkdownRows(said).at(40)
    ]


def test_a_long_list_is_laid_out_once() -> None:
    rows = MarkdownRows("".join(f"{n}. point\n" for n in range(1, 500)))
    assert len(rows.at(80)) - rows.finished <= 2
    for piece in ("500", ". the", " last\n", "501. more"):
        rows.add(piece)
    after = rows.at(80)
    assert [row.text.plain for row in after[-2:]] == ["500. the last", "501. more"]
    assert len(after) - rows.finished <= 2


def test_a_long_listing_is_coloured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured: list[int] = []
    monkeypatch.setattr(markdown, "highlighted", _counted(markdown.highlighted, coloured))
    code = "".join(f"value_{n} = {n}\n" for n in range(1000))
    rows = MarkdownRows("```python\n" + code)
    before = len(rows.at(80))
    coloured.clear()
    rows.add("more = 1\n")
    assert len(rows.at(80)) == before + 1
    assert sum(coloured) <= 60


def _counted(highlighted: Callable[[str, str], Text], lines: list[int]) -> Any:
    def counted(code: str, language: str) -> Text:
        lines.append(code.count("\n") + 1)
        return highlighted(code, language)

    return counted


def test_a_link_by_reference_is_shown_as_written() -> None:
    said = "see [there][1]\n\nand more\n\n[1]: https://example.org"
    assert shown(MarkdownRows(said)) == said


def test_lists_tables_quotes_and_code_are_drawn() -> None:
    text = (
        "# Title\n\n1. one\n2. two\n   - inner\n10. ten\n\n> said\n> more\n\n| name | n o "
        "|\n|---|--:|\n| a<br>b | 1 |\n\n"
        "```nonsense\nif x:\n\ty\n```\n\nline  \nbroken\n\n---\n"
    )
    assert shown(MarkdownRows(text), 30) == (
        "Title\n\n1. one\n2. two\n   ▪ inner\n3. ten\n\n▌ said more\n\n"
        "name │ n o\n─────┼────\na    │   1\nb    │\n\n  [1] nonsense\n  if x:\n      "
        "y\n\nline\nbroken\n\n" + "─" * 30
    )


def test_a_table_too_wide_for_the_screen_wraps_in_its_cells() -> None:
    rows = MarkdownRows("| a | b |\n|---|---|\n| " + "word " * 20 + "| x |\n").at(30)
    assert all(cell_len(row.text.plain) <= 30 for row in rows)
    assert sum("word" in row.text.plain for row in rows) > 2


def test_a_table_that_does_not_fit_is_shown_as_values_with_their_headers() -> None:
    columns = ["model", "memory", "speed", "context", "quality", "licence"]
    cells = ["qwen3-8b-instruct", "6.2 GB", "20 tok/s", "32,768", "good", "Apache-2.0"]
    source = "\n".join(
        [f"|{'|'.join(columns)}|", "|-" * 6 + "|", f"|{'|'.join(cells)}|", f"|{'|'.join(cells)}|"]
    )
    rows = [row.text.plain for row in MarkdownRows(source).at(36)]
    record = [f"{name}: {value}" for name, value in zip(columns, cells, strict=True)]
    assert rows == [*record, "", *record]
    assert " │ " in MarkdownRows(source).at(100)[0].text.plain


def test_prose_is_limited_in_width_but_code_and_tables_are_not() -> None:
    code = "x = " + "1 + " * 35 + "1"
    cell = "value " * 11
    source = f"{'word ' * 60}\n\n```\n{code}\n```\n\n|a|b|\n|-|-|\n|{cell}|{cell}|\n"
    rows = [row.text.plain for row in MarkdownRows(source).at(180)]
    assert f"  {code}" in rows
    assert any(row.count("value") == 22 for row in rows)
    assert max(len(row) for row in rows if "word" in row) <= PROSE_CELLS
