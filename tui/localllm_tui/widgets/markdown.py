"""Markdown as rows of text at a width. A longer answer costs no more per frame than a short one.

Textual's own Markdown is a widget for each block, item and cell, and every frame looks at all of
them: at 8,000 characters a frame took 130 ms, at 100,000 it took 300. Here a finished block is laid
out once, and only the rows on screen are drawn.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from localllm_tui.widgets.code import highlighted
from localllm_tui.widgets.formulas import as_unicode, with_formulas

# Code is highlighted and wrapped in chunks of this many lines, each once, so that a long listing
# can grow.
CODE_LINES = 60
# Required by `Text.wrap`, although it has no effect in our use.
_CONSOLE = Console(width=80)
_BULLETS = "•▪‣⭑◦"
_LISTS = ("bullet_list", "ordered_list")
_MARKS = {"strong": "bold", "em": "italic", "s": "strike", "link": "link"}
_ADDRESSES = {"image": "src", "link": "href"}
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MarkdownRow:
    """A line on screen. Its styles are names of `code.STYLES`, and a theme defines their looks."""

    text: Text
    soft: bool = False  # continues the line of the previous row
    lead: int = 0  # number of characters at the beginning that do not belong to that line
    fill: str = ""  # the style up to the right edge
    label: bool = False  # a heading for what follows, and no part of the text


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the text that is laid out in one step.

    `line`: the line of the tail at which it begins.
    `number`: the number of a list item, except the first.
    """

    rows: list[MarkdownRow]
    line: int
    number: int | None = None


class MarkdownRows:
    """A text that grows by `add`, laid out as rows. `plain`: it is no Markdown."""

    def __init__(self, text: str = "", *, plain: bool = False) -> None:
        self.source = text
        self.finished = 0  # the rows before its last block: only that may become another one
        self._plain = plain
        self._width = 0  # not laid out yet

    def at(self, width: int) -> list[MarkdownRow]:
        if width != self._width:
            self._width = width
            self._relayout()
        return self._rows

    def add(self, new: str) -> None:
        self.source += new
        if self._width:
            self._tail += new
            self._lay_out()

    def _relayout(self) -> None:
        self._rows: list[MarkdownRow] = []
        self._tail = self.source  # the text from the last block on
        self.finished = 0
        # of the item at which the tail begins, if its list began earlier
        self._number: int | None = None
        self._fences = 0  # before the tail
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out the last piece again, and those after it."""
        del self._rows[self.finished :]
        lines = _lines(self._tail)
        pieces = [*(self._lines(lines) if self._plain else self._pieces())]
        # The kind of a line is only known at its end: "-" may become "---", or belong to the
        # previous line.
        begun = max((n for n, piece in enumerate(pieces) if piece.line < len(lines) - 1), default=0)
        for n, piece in enumerate(pieces):
            if n == begun and n:
                self._fences += sum(row.label for row in self._rows[self.finished :])
                self.finished = len(self._rows)
                self._number = piece.number
                self._tail = "".join(lines[piece.line :])
            self._rows += piece.rows

    def _lines(self, lines: Sequence[str]) -> Iterator[_Piece]:
        for n, line in enumerate(lines):
            yield _Piece([*_wrapped(Text(line.rstrip("\n")), self._width)], n)

    def _pieces(self) -> Iterator[_Piece]:
        """The blocks of the tail, of a list each item: lists grow long."""
        root = SyntaxTreeNode(_parser().parse(self._tail))
        fences = [node for node in root.walk() if node.type == "fence"]
        for number, fence in enumerate(fences, self._fences + 1):
            fence.meta["number"] = number
        above = bool(self.finished)  # something to keep apart from: an empty quote has no rows
        for n, node in enumerate(root.children):
            if node.type in _LISTS:
                pieces = [*self._items(node, self._number if n == 0 else None)]
            else:
                pieces = [_Piece([*_block(node, self._width)], _line(node))]
            if above and pieces and pieces[0].rows and pieces[0].number is None:
                pieces[0] = replace(pieces[0], rows=[MarkdownRow(Text("")), *pieces[0].rows])
            above = above or any(piece.rows for piece in pieces)
            yield from pieces

    def _items(self, node: SyntaxTreeNode, begun: int | None) -> Iterator[_Piece]:
        """A piece for each item of a list; `begun`: the number of the first item, if the list began
        before the tail."""
        first = _first(node) if begun is None else begun
        for number, item in enumerate(node.children, first):
            rows = [*_item(node, item, number, self._width)]
            begins_list = begun is None and number == first
            yield _Piece(rows, _line(item), None if begins_list else number)


def _line(node: SyntaxTreeNode) -> int:
    if node.map:
        return node.map[0]
    return 0


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    # Links by reference are shown as written: their addresses may come much later.
    return with_formulas(MarkdownIt("gfm-like").disable("reference"))


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
        yield from _led(_stacked(node.children, width - 2, depth), bar, bar)
    else:
        yield from _leaf(node, width)


def _leaf(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    """A block that holds no other blocks."""
    if node.type == "heading":
        return _wrapped(_inline(node, f"heading.{node.tag}"), width)
    if node.type in ("fence", "code_block"):
        return _code_block(node, width)
    if node.type == "table":
        return _table(node, width)
    if node.type == "formula_block":
        return _formula(node, width)
    if node.type == "html_block":
        return _wrapped(Text(node.content.rstrip()), width)
    if node.type == "hr":
        return iter([MarkdownRow(Text("─" * width, "rule"))])
    return _wrapped(_inline(node), width)


def _code_block(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    language = (node.info.split() or [""])[0]
    if "number" in node.meta:
        yield _code_label(node.meta["number"], language, width)
    yield from _code(node.content, language, width)


def _formula(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    said = as_unicode(node.content) if node.content else ""
    if not said:
        return _wrapped(Text(node.markup), width)
    margin = Text("    ")
    return _led(_wrapped(Text(said), width - 4), margin, margin)


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
    yield from _led(inside, Text(bullet, "bullet"), Text(" " * len(bullet)))


def _led(rows: Iterable[MarkdownRow], first: Text, others: Text) -> Iterator[MarkdownRow]:
    """The rows, each after its lead."""
    for n, row in enumerate(rows):
        lead = first if n == 0 else others
        yield replace(row, text=Text.assemble(lead, row.text), lead=len(lead) + row.lead)


def _code_label(number: int, language: str, width: int) -> MarkdownRow:
    """The line above a code block: the number by which a key copies it; so does a click."""
    said = Text(f"  [{number}] {language}".rstrip(), "code.label", no_wrap=True)
    said.truncate(width)
    said.stylize(Style(meta={"@click": ("copy_code", (number,))}))
    return MarkdownRow(said, fill="code.block", label=True)


def _code(code: str, language: str, width: int) -> Iterator[MarkdownRow]:
    lines = code.removesuffix("\n").expandtabs(4).split("\n")
    for start in range(0, len(lines), CODE_LINES):
        yield from _code_run("\n".join(lines[start : start + CODE_LINES]), language, width)


@lru_cache(maxsize=256)
def _code_run(code: str, language: str, width: int) -> Sequence[MarkdownRow]:
    rows = _wrapped(highlighted(code, language), width - 4, fill="code.block")
    return [*_led(rows, Text("  ", "code.block"), Text("  ", "code.block"))]


def _table(node: SyntaxTreeNode, width: int) -> Iterator[MarkdownRow]:
    lines = []
    for part in node.children:
        style = "table.head" if part.type == "thead" else ""
        lines += [_cells(line, style) for line in part.children]
    widths = _columns(lines, width)
    head = node.children[0].children[0]
    right = ["right" in str(cell.attrs.get("style", "")) for cell in head.children]
    for n, line in enumerate(lines):
        cells = [_wrapped(cell, room) for cell, room in zip(line, widths, strict=True)]
        for rows in itertools.zip_longest(*cells, fillvalue=MarkdownRow(Text(""))):
            pieces = [row.text for row in rows]
            padded = (_padded(*cell) for cell in zip(pieces, widths, right, strict=True))
            yield MarkdownRow(Text.assemble((" │ ", "rule")).join(padded))
        if n == 0:
            yield MarkdownRow(Text("─┼─".join("─" * room for room in widths), "rule"))


def _cells(line: SyntaxTreeNode, style: str) -> list[Text]:
    return [_inline(cell, style) for cell in line.children]


def _padded(piece: Text, room: int, right: bool) -> Text:
    free = " " * (room - cell_len(piece.plain))
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


# -- words -----------------------------------------------------------------------------------------


def _wrapped(text: Text, width: int, fill: str = "") -> Iterator[MarkdownRow]:
    """The rows of a text that may have lines of its own."""
    lines = [text]
    if "\n" in text.plain:
        lines = [*text.split("\n", allow_blank=True)]
    for line in lines:
        for n, piece in enumerate(line.wrap(_CONSOLE, max(1, width))):
            yield MarkdownRow(piece, soft=n > 0, fill=fill)


def _inline(node: SyntaxTreeNode, style: str = "") -> Text:
    text = Text(style=style)
    for inline in node.children:
        _words(inline, text)
    return text


def _words(node: SyntaxTreeNode, text: Text) -> None:
    start = len(text)
    own = _own_text(node)
    if own is not None:
        text.append(own, "code.inline" if node.type == "code_inline" else None)
    else:
        for child in node.children:
            _words(child, text)
    if node.type in _MARKS:
        text.stylize(_MARKS[node.type], start)
    if node.type in _ADDRESSES:
        address = str(node.attrs.get(_ADDRESSES[node.type], ""))
        text.stylize(Style(meta={"@click": ("link", (address,))}), start)


def _own_text(node: SyntaxTreeNode) -> str | None:
    """The text of a part of a line; None if it consists of other parts."""
    if node.type == "text":
        return re.sub(r"\s+", " ", node.content)
    if node.type == "code_inline":
        return node.content
    if node.type == "formula":
        return as_unicode(node.content) or node.markup
    if node.type == "softbreak":
        return " "
    if node.type == "hardbreak" or (node.type == "html_inline" and _BREAK.fullmatch(node.content)):
        return "\n"
    if node.type == "html_inline":
        return node.content
    if node.type == "image":
        return f"🖼  {node.content}".rstrip()
    return None
