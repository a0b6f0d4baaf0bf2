"""Tables of Markdown as rows: in columns if there is room, else as "header: value"."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from localllm_tui.widgets.rows import EMPTY, MarkdownRow, wrapped

# A table is shown as "header: value" rows if a column would be narrower than this and its text
# wider.
_MIN_COLUMN = 6


def table_rows(
    lines: Sequence[Sequence[Text]], right: Sequence[bool], width: int, *, continued: bool
) -> Iterator[MarkdownRow]:
    """`lines` of cells, the header first. `right`: the columns that end at the right.

    `continued`: the rows follow those of the same table, so the header is not shown.
    """
    widths = _columns(lines, width)
    if _is_narrow(lines, widths, width):
        yield from _records(lines, width)
        return
    first = 1 if continued else 0
    for n, line in enumerate(lines[first:], first):
        yield from _table_line(line, widths, right)
        if n == 0:
            yield MarkdownRow(Text("─┼─".join("─" * width_ for width_ in widths), "rule"))


def _table_line(
    line: Sequence[Text], widths: Sequence[int], right: Sequence[bool]
) -> Iterator[MarkdownRow]:
    cells = [wrapped(cell, width) for cell, width in zip(line, widths, strict=True)]
    for rows in itertools.zip_longest(*cells, fillvalue=EMPTY):
        pieces = [row.text for row in rows]
        padded = (_padded(*cell) for cell in zip(pieces, widths, right, strict=True))
        yield MarkdownRow(Text.assemble((" │ ", "rule")).join(padded))


def _is_narrow(lines: Sequence[Sequence[Text]], widths: Sequence[int], width: int) -> bool:
    """True if the columns of a table have too little room for their words."""
    if sum(widths) + 3 * (len(widths) - 1) > width:
        return True
    for column, width_ in zip(zip(*lines, strict=True), widths, strict=True):
        if width_ < _MIN_COLUMN and max(map(_cell_width, column)) > width_:
            return True
    return False


def _records(lines: Sequence[Sequence[Text]], width: int) -> Iterator[MarkdownRow]:
    """A table as rows of "header: value", with an empty row between its lines."""
    head = lines[0]
    for n, line in enumerate(lines[1:]):
        if n:
            yield EMPTY
        for name, value in zip(head, line, strict=True):
            yield from wrapped(Text.assemble(name, ": ", value), width)


def _padded(piece: Text, width_: int, right: bool) -> Text:
    free = " " * (width_ - cell_len(piece.plain))
    if right:
        return Text.assemble(free, piece)
    return Text.assemble(piece, free)


def _columns(lines: Sequence[Sequence[Text]], width: int) -> list[int]:
    """Column widths: as wide as the text while there is room; then the widest ones shrink."""
    widths = [max([1, *map(_cell_width, column)]) for column in zip(*lines, strict=True)]
    too_much = sum(widths) + 3 * (len(widths) - 1) - width
    for _ in range(min(too_much, sum(widths) - len(widths))):
        widths[widths.index(max(widths))] -= 1
    return widths


def _cell_width(cell: Text) -> int:
    return max(map(cell_len, cell.plain.split("\n")), default=0)
