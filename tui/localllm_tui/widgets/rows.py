"""The rows of a text on screen, and how a text is wrapped into them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from rich.console import Console
from rich.style import Style
from rich.text import Span, Text

# Required by `Text.wrap`, although it has no effect in our use.
_CONSOLE = Console(width=80)


@dataclass(frozen=True, slots=True)
class MarkdownRow:
    """A line on screen. Its styles are names of `code.STYLES`, and a theme defines their looks."""

    text: Text
    soft: bool = False  # True if it continues the line of the previous row
    gap: str = ""  # the white space of the source between that row and this one
    lead: int = 0  # number of characters at the beginning that do not belong to that line
    fill: str = ""  # the style up to the right edge
    label: bool = False  # a heading of the following rows, not part of the text
    source: str = (
        ""  # of a drawing of several rows: the text that is copied in place of all of them
    )


_TABS = re.compile("(\t+)")
TAB_CELLS = 4

EMPTY = MarkdownRow(Text(""))


class Rows(Sequence[MarkdownRow]):
    """The rows of a text, of which a long one has many 100,000. They are kept as tuples of texts
    and numbers, which the garbage collector skips. A row is made when it is read."""

    def __init__(self) -> None:
        self._kept: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, at: int) -> MarkdownRow: ...
    @overload
    def __getitem__(self, at: slice) -> list[MarkdownRow]: ...
    def __getitem__(self, at: int | slice) -> MarkdownRow | list[MarkdownRow]:
        if isinstance(at, slice):
            return [_made(stored) for stored in self._kept[at]]
        return _made(self._kept[at])

    def add(self, rows: Iterable[MarkdownRow]) -> None:
        for row in rows:
            text = row.text
            spans = itertools.chain.from_iterable(text.spans)
            drawn = (row.soft, row.gap, row.lead, row.fill, row.label, row.source)
            self._kept.append((text.plain, text.style, *drawn, *spans))

    def cut(self, n: int) -> None:
        """Keep the first `n` rows only."""
        del self._kept[n:]

    def plain(self) -> Iterator[str]:
        """The texts of the rows, without styles."""
        for stored in self._kept:
            yield stored[0]


def _made(stored: tuple[Any, ...]) -> MarkdownRow:
    plain, style, *drawn = stored[:8]
    parts = iter(stored[8:])
    spans = [Span(start, end, mark) for start, end, mark in zip(parts, parts, parts, strict=True)]
    return MarkdownRow(Text(plain, style, spans=spans), *drawn)


# The fill of the rows of code, which are copied with their blanks and without their margin.
CODE = "code.block"
# The name under which a style keeps the text that is copied in place of what is shown.
SOURCE = "source"


def with_tabs(text: Text, code: str) -> Text:
    """Return `text`, which is `code` with spaces for tabs. Tabs are the source of the spaces."""
    at = 0
    for line in code.split("\n"):
        column = 0
        for run in _TABS.split(line):
            width = len(run)
            if run.startswith("\t"):
                width = TAB_CELLS * len(run) - column % TAB_CELLS
                text.stylize(Style(meta={SOURCE: run}), at + column, at + column + width)
            column += width
        at += column + 1
    return text


def copied(row: MarkdownRow, start: int, end: int, done: list[object]) -> str:
    """The text of a row between two of its places as it is copied: a formula as its source. `done`:
    the styles of the formulas that were copied, whose other parts follow on the next row."""
    text = ""
    at = start
    for span in row.text.spans:
        source = _source(span.style)
        if not source or span.end <= start or span.start >= end:
            continue
        text += row.text.plain[at : max(at, span.start)]
        if not any(style is span.style for style in done):
            done.append(span.style)
            text += source
        at = max(at, span.end)
    return text + row.text.plain[at : max(at, end)]


def _source(style: str | Style) -> str:
    if isinstance(style, Style):
        return str(style.meta.get(SOURCE, ""))
    return ""


def wrapped(text: Text, width: int, fill: str = "") -> Iterator[MarkdownRow]:
    """Return the rows of a text, which may contain line breaks."""
    lines = [text]
    if "\n" in text.plain:
        lines = [*text.split("\n", allow_blank=True)]
    for line in lines:
        source = line.plain
        if len(source) <= width and source.isascii() and "\t" not in source:
            yield MarkdownRow(line, fill=fill)
            continue
        end = 0
        for n, piece in enumerate(line.wrap(_CONSOLE, max(1, width))):
            begin = source.find(piece.plain, end)
            gap = " "  # the console has changed white space, such as a tab
            if begin >= 0:
                gap = source[end:begin]
                end = begin + len(piece.plain.rstrip())
            yield MarkdownRow(piece, soft=n > 0, gap=gap, fill=fill)
