"""Markdown as rows of text at a width. A longer answer costs no more per frame than a short one.

Textual's own Markdown is a widget for each block, item and cell, and every frame looks at all of
them: at 8,000 characters a frame took 130 ms, at 100,000 it took 300. Here a finished block is laid
out once, and only the rows on screen are drawn.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from markdown_it.tree import SyntaxTreeNode
from rich.style import Style
from rich.text import Text

from localllm_tui.widgets.code import highlighted
from localllm_tui.widgets.formulas import as_lines, as_unicode
from localllm_tui.widgets.mermaid import diagram_rows
from localllm_tui.widgets.rows import (
    CODE,
    EMPTY,
    TAB_CELLS,
    MarkdownRow,
    Rows,
    with_tabs,
    wrapped,
)
from localllm_tui.widgets.tables import table_rows
from localllm_tui.widgets.words import parser_of_blocks, styled

# Code is highlighted and wrapped in chunks of this many lines, each once, so that a long listing
# can grow.
CODE_LINES = 60
# The characters that are laid out at once, if that takes no more than so much processor time. The
# texts of a screen share this time, and each gets one part.
FIRST_CHARS = 16_000
_FIRST_S = 0.05
_SHARED_FOR_S = 0.5
# Longer lines of prose are hard to read.
PROSE_CELLS = 102
# The characters of the longest block that is laid out whole.
LONGEST_BLOCK = 4_000
_BULLETS = "•▪‣⭑◦"
_LISTS = ("bullet_list", "ordered_list")


_NO_END = 1 << 62
_KEEPS_LINES = ("fence", "code_block", "table", "line", "html_block")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the text that is laid out in one step.

    `lay_out`: makes its rows.
    `line`: the line of the tail at which it begins.
    `number`: the number of a list item, except the first.
    `kind`: the type of its node.
    """

    lay_out: Callable[[], Iterable[MarkdownRow]]
    line: int
    number: int | None = None
    kind: str = ""


class _FirstTime:
    """The processor time for the first parts of all texts that are laid out at about the same
    time."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._begun_s = float("-inf")

    def left_s(self) -> float:
        if time.monotonic() - self._begun_s > _SHARED_FOR_S:
            self._begun_s = time.monotonic()
            self._spent_s = 0.0
        return _FIRST_S - self._spent_s

    def spent(self, cpu_s: float) -> None:
        self._spent_s += cpu_s


_first_time = _FirstTime()


class MarkdownRows:
    """A text that grows by `add`, laid out as rows. `plain`: the text is not Markdown.

    The time is linear in the length of the text, whatever it contains. The parser takes more for
    some texts, and every frame parses the last block again. So the parser gets slices, and a long
    block is cut.
    """

    def __init__(self, text: str = "", *, plain: bool = False) -> None:
        self.source = text
        self.finished = 0  # the rows before its last block; only the last block can still change
        self._plain = plain
        self._width = 0  # not laid out yet

    def at(self, width: int) -> Rows:
        """All rows at this width."""
        rows = self.so_far(width)
        while not self.complete:
            self.lay_out_more()
        return rows

    def so_far(self, width: int) -> Rows:
        """The rows that are laid out at this width: at least those of the first characters."""
        if width != self._width:
            self._width = width
            self._begin()
            self._lay_out_first()
        return self._rows

    @property
    def complete(self) -> bool:
        """True if all of the text is laid out."""
        return self._taken == len(self.source)

    def add(self, new: str) -> None:
        goes_on = self._width and self.complete
        self.source += new
        if goes_on:
            self._lay_out_first()

    def _lay_out_first(self) -> None:
        end = self._taken + FIRST_CHARS
        begun_s = time.thread_time()
        self.lay_out_for(_first_time.left_s(), end)
        _first_time.spent(time.thread_time() - begun_s)

    def lay_out_for(self, cpu_s: float, end: int = _NO_END) -> None:
        """Lay out the next parts, up to the character `end`, until so many seconds of processor
        time are over. At least one part is laid out."""
        begun_s = time.thread_time()
        while not self.complete and self._taken < end:
            self.lay_out_more()
            if time.thread_time() - begun_s > cpu_s:
                break

    def _begin(self) -> None:
        self._rows = Rows()
        self._tail = ""  # the text from the last block on
        self._taken = 0  # the characters of the text that are laid out
        self.finished = 0
        # number of the item at which the tail begins, if its list began earlier
        self._number: int | None = None
        self._fences = 0  # before the tail
        self._continued = ""  # the type of the node in which the tail begins
        self._opening = ""  # the lines that open this node again
        self._gap = ""  # the white space before the tail, if the tail begins in a paragraph
        self._lay_out()

    def lay_out_more(self) -> None:
        """Lay out the next part of the text. A part ends where the tail is too long for a block, so
        a text has the same parts however it arrives."""
        room = LONGEST_BLOCK + 1 - len(self._tail)
        new = self.source[self._taken : self._taken + room]
        self._taken += len(new)
        self._tail += new
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out the tail again: the last block, and those after it."""
        self._rows.cut(self.finished)
        lines = _lines(self._tail)
        nodes: Sequence[SyntaxTreeNode] = ()
        if self._plain:
            pieces = [*self._lines(lines)]
        else:
            nodes = self._nodes()
            pieces = [*self._pieces(nodes)]
        too_long = len(self._tail) > LONGEST_BLOCK
        if too_long and len(pieces) < 2:
            self._cut(pieces[0].kind if pieces else "")
        else:
            self._add_rows(lines, pieces, too_long=too_long)
        _free(nodes)

    def _add_rows(self, lines: list[str], pieces: list[_Piece], *, too_long: bool) -> None:
        # The kind of a line is only known at its end: "-" may become "---", or belong to the
        # previous line.
        begun = max((n for n, piece in enumerate(pieces) if piece.line < len(lines) - 1), default=0)
        if not begun and too_long:
            begun = 1
        for n, rows in enumerate(self._laid_out(pieces)):
            if n == begun and n:
                self._finish(pieces[n].number, "".join(lines[pieces[n].line :]))
            self._rows.add(rows)

    def _laid_out(self, pieces: Iterable[_Piece]) -> Iterator[list[MarkdownRow]]:
        """The rows of each piece. An empty row separates it from existing rows; an empty quote has
        no rows."""
        above = bool(self.finished) and not self._continued
        joins = self._begins_in_row()
        for piece in pieces:
            rows = [*piece.lay_out()]
            if rows and joins:
                rows[0] = replace(rows[0], soft=True, gap=self._gap)
            elif rows and above and piece.number is None and not self._plain:
                rows.insert(0, EMPTY)
            joins = False
            above = above or bool(rows)
            yield rows

    def _begins_in_row(self) -> bool:
        """True if the tail begins within a row."""
        keeps_line = self._continued in _KEEPS_LINES and self._gap
        return bool(self._continued) and self._gap != "\n" and not keeps_line

    def _finish(self, number: int | None, tail: str, gap: str = "") -> None:
        """Let the tail begin after the rows that are there."""
        self._fences += sum(row.label for row in self._rows[self.finished :])
        self.finished = len(self._rows)
        self._number = number
        self._tail = tail
        self._gap = gap
        self._continued = self._opening = ""

    def _cut(self, kind: str) -> None:
        """Cut the only block of a tail that is too long: after a line, else after a word."""
        tail = self._tail
        opening = self._opening or _opening(kind, tail)
        at = tail.rfind("\n", len(opening) + 1, LONGEST_BLOCK) + 1
        if not at:
            at = tail.rfind(" ", 1, LONGEST_BLOCK) + 1
        at = at or LONGEST_BLOCK
        gap = ""
        if tail[at - 1].isspace():
            gap = tail[at - 1]
        if kind == "paragraph" and gap:
            gap = " "
        self._tail = tail[:at]
        self._lay_out()
        self._finish(None, tail[at:], gap)
        self._continued = kind
        self._opening = opening
        self._lay_out()

    def _lines(self, lines: Sequence[str]) -> Iterator[_Piece]:
        for n, line in enumerate(lines):
            yield _Piece(partial(_line_rows, line.rstrip("\n"), self._width), n, kind="line")

    def _pieces(self, nodes: Sequence[SyntaxTreeNode]) -> Iterator[_Piece]:
        """The blocks of the tail, of a list each item: lists grow long."""
        for n, node in enumerate(nodes):
            yield from self._pieces_of(node, self._number if n == 0 else None)

    def _nodes(self) -> Sequence[SyntaxTreeNode]:
        """Parse the tail, and number its code blocks."""
        text = self._opening + self._tail
        root = SyntaxTreeNode(parser_of_blocks().parse(text))
        fences = [node for node in root.walk() if node.type == "fence"]
        if self._opening:
            root.children[0].meta["continued"] = True
            fences = [fence for fence in fences if "continued" not in fence.meta]
        for number, fence in enumerate(fences, self._fences + 1):
            fence.meta["number"] = number
        return root.children

    def _pieces_of(self, node: SyntaxTreeNode, begun: int | None) -> list[_Piece]:
        if node.type in _LISTS:
            return [*self._items(node, begun)]
        line = max(0, _line(node) - self._opening.count("\n"))
        return [_Piece(partial(_block, node, self._width), line, kind=node.type)]

    def _items(self, node: SyntaxTreeNode, begun: int | None) -> Iterator[_Piece]:
        """A piece for each item of a list; `begun`: the number of the first item, if the list began
        before the tail."""
        first = _first(node) if begun is None else begun
        for number, item in enumerate(node.children, first):
            begins_list = begun is None and number == first
            yield _Piece(
                partial(_item, node, item, number, self._width),
                _line(item),
                None if begins_list else number,
                "paragraph",
            )


def _free(nodes: Iterable[SyntaxTreeNode]) -> None:
    """Remove the references of nodes to their parents. Else only the garbage collector frees the
    trees, and it would stop the chat for long."""
    for node in nodes:
        for inside in node.walk():
            inside.parent = None


def _opening(kind: str, text: str) -> str:
    """The lines with which the next part of a block begins: of a code block the first line, of a
    table its head."""
    lines = 0
    if kind == "fence":
        lines = 1
    elif kind == "table":
        lines = 2
    opening = "".join(_lines(text)[:lines])
    if len(opening) > LONGEST_BLOCK // 4:
        return ""
    return opening


def _line_rows(line: str, width: int) -> Iterable[MarkdownRow]:
    """The rows of a line that is not Markdown."""
    if not line:
        return [EMPTY]
    return wrapped(Text(line), min(width, PROSE_CELLS))


def _line(node: SyntaxTreeNode) -> int:
    if node.map:
        return node.map[0]
    return 0


def _lines(text: str) -> list[str]:
    """The lines as Markdown counts them, each with its end."""
    return re.split(r"(?<=\n)", text.replace("\r\n", "\n").replace("\r", "\n"))


# -- blocks ----------------------------------------------------------------------------------------


def _block(node: SyntaxTreeNode, width: int, depth: int = 0) -> Iterator[MarkdownRow]:
    width = max(1, width)
    if node.type in _LISTS:
        for n, item in enumerate(node.children):
            yield from _item(node, item, _first(node) + n, width, depth)
    elif node.type == "blockquote":
        bar = Text("▌ ", "quote")
        yield from _with_prefix(_stacked(node.children, width - 2, depth), bar, bar)
    else:
        yield from _leaf(node, width)


def _leaf(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    """Lay out a block without other blocks inside. Code and tables use all of the width."""
    if node.type in ("fence", "code_block"):
        return _code_block(node, width)
    if node.type == "table":
        return _table(node, width)
    width = min(width, PROSE_CELLS)
    if node.type == "heading":
        return wrapped(_words(node, f"heading.{node.tag}"), width)
    if node.type == "formula_block":
        return _formula(node, width)
    if node.type == "html_block":
        return wrapped(Text(node.content.rstrip()), width)
    if node.type == "hr":
        return iter([MarkdownRow(Text("─" * width, "rule"))])
    return wrapped(_words(node), width)


def _code_block(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    language = (node.info.split() or [""])[0]
    if "number" in node.meta:
        yield _code_label(node.meta["number"], language, width)
    diagram: tuple[str, ...] = ()
    if language == "mermaid" and _is_closed(node):
        diagram = diagram_rows(node.content, width - 2)
    if diagram:
        rows = [MarkdownRow(Text(f"  {row}", no_wrap=True)) for row in diagram]
        yield from _drawn(rows, node.content.rstrip())
    else:
        yield from _code(node.content, language, width)


def _is_closed(fence: SyntaxTreeNode) -> bool:
    """True if a code block has its last line."""
    return fence.map is not None and fence.map[1] - fence.map[0] == fence.content.count("\n") + 2


def _formula(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    margin = Text("    ")
    lines = as_lines(node.content, width - 4) if node.content else ()
    rows: Iterable[MarkdownRow] = [MarkdownRow(Text(line, no_wrap=True)) for line in lines]
    if not lines:
        text = as_unicode(node.content) if node.content else ""
        if not text:
            return wrapped(Text(node.markup), width)
        rows = wrapped(Text(text), width - 4)
    return _drawn(_with_prefix(rows, margin, margin), node.markup)


def _drawn(rows: Iterable[MarkdownRow], source: str) -> Iterator[MarkdownRow]:
    """The rows of a drawing, which is copied as its source."""
    for row in rows:
        yield replace(row, source=source)


def _stacked(
    nodes: Iterable[SyntaxTreeNode], width: int, depth: int, *, tight: bool = False
) -> Iterator[MarkdownRow]:
    """Blocks below each other, with an empty row between them."""
    for n, node in enumerate(nodes):
        if n and not (tight and node.type in (*_LISTS, "paragraph")):
            yield MarkdownRow(Text(""))
        yield from _block(node, width, depth)


def _first(node: SyntaxTreeNode) -> int:
    return int(node.attrs.get("start", 1))


def _item(
    node: SyntaxTreeNode, item: SyntaxTreeNode, number: int, width: int, depth: int = 0
) -> Iterator[MarkdownRow]:
    boxes = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
    if node.type == "ordered_list":
        bullet = f"{number}. "
    else:
        bullet = f"{_BULLETS[depth % len(_BULLETS)]} "
    inside = [*_stacked(item.children, width - len(bullet), depth + 1, tight=True)]
    if not inside:
        inside = [MarkdownRow(Text(""))]
    box = boxes.get(inside[0].text.plain[:4])
    if box is not None:
        bullet = box.ljust(len(bullet))
        inside[0] = replace(inside[0], text=inside[0].text[4:])
    yield from _with_prefix(inside, Text(bullet, "bullet"), Text(" " * len(bullet)))


def _with_prefix(rows: Iterable[MarkdownRow], first: Text, others: Text) -> Iterator[MarkdownRow]:
    """The rows, each after its lead."""
    for n, row in enumerate(rows):
        lead = first if n == 0 else others
        yield replace(row, text=Text.assemble(lead, row.text), lead=len(lead) + row.lead)


def _code_label(number: int, language: str, width: int) -> MarkdownRow:
    """The line above a code block: the number by which a key copies it; so does a click."""
    text = Text(f"  [{number}] {language}".rstrip(), "code.label", no_wrap=True)
    text.truncate(width)
    text.stylize(Style(meta={"@click": ("copy_code", (number,))}))
    return MarkdownRow(text, fill=CODE, label=True)


def _code(code: str, language: str, width: int) -> Iterator[MarkdownRow]:
    lines = code.removesuffix("\n").split("\n")
    for start in range(0, len(lines), CODE_LINES):
        yield from _code_run("\n".join(lines[start : start + CODE_LINES]), language, width)


@lru_cache(maxsize=256)
def _code_run(code: str, language: str, width: int) -> Sequence[MarkdownRow]:
    text = highlighted(code.expandtabs(TAB_CELLS), language)
    if "\t" in code:
        text = with_tabs(text, code)
    rows = wrapped(text, width - 4, fill=CODE)
    return [*_with_prefix(rows, Text("  ", CODE), Text("  ", CODE))]


def _table(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    lines = []
    for part in node.children:
        style = "table.head" if part.type == "thead" else ""
        lines += [_cells(line, style) for line in part.children]
    head = node.children[0].children[0]
    right = ["right" in str(cell.attrs.get("style", "")) for cell in head.children]
    return table_rows(lines, right, width, continued=bool(node.meta.get("continued")))


def _cells(line: SyntaxTreeNode, style: str) -> list[Text]:
    return [_words(cell, style) for cell in line.children]


def _words(node: SyntaxTreeNode, style: str = "") -> Text:
    source = "".join(inline.content for inline in node.children)
    return styled(source, style)
