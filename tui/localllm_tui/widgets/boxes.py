"""Boxes of text that a formula is made of: rows of boxes, fractions, roots, brackets and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.cells import cell_len

# The class of a box, which decides the gaps next to it. A "sign" is an operator with one operand.
Kind: TypeAlias = Literal[
    "ord", "text", "op", "rel", "bin", "infix", "bar", "sign", "open", "close", "punct", "frac",
    "row",
]  # fmt: skip
_SCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃ-ᶿⁱⁿ₀-₎ₐ-ₜᴬ-ᵪⱼⱽʰʲʳˢˣʷʸˡ′″‴°*†"
_MARKED = f"[\u0300-\u036f\u20d0-\u20ff{_SCRIPTS}]*"
# One operand: a number, a letter, a differential, a function of a letter, or a root of one letter.
_OPERAND = re.compile(rf"[\d.]+{_MARKED}|√?\w{_MARKED}!?|[d∂]{_MARKED}\w{_MARKED}")
_CALLED = re.compile(rf"(?:√|\w{_MARKED}|\w\^)?\(")
_AFTER_BRACKET = re.compile(rf"{_MARKED}!?")
_PRODUCT = re.compile(r"[^\s+\-/=<>|,()\[\]]*")
# The sides of brackets that are higher than one row: top, middle, bottom, and the piece between.
_TALL = {
    "(": "⎛⎜⎝⎜", ")": "⎞⎟⎠⎟", "[": "⎡⎢⎣⎢", "]": "⎤⎥⎦⎥", "{": "⎧⎨⎩⎪", "}": "⎫⎬⎭⎪",
    "⌊": "⎢⎢⎣⎢", "⌋": "⎥⎥⎦⎥", "⌈": "⎡⎢⎢⎢", "⌉": "⎤⎥⎥⎥", "|": "││││", "‖": "‖‖‖‖",
}  # fmt: skip
_TWO_ROWS = {"{": "⎰⎱", "}": "⎱⎰"}


@dataclass(frozen=True, slots=True)
class Box:
    """Lines of text. `base`: the line that is level with the rest of the formula. `limits`: in a
    formula of several lines its scripts are above and below it."""

    lines: tuple[str, ...]
    base: int = 0
    kind: Kind = "ord"
    limits: bool = False

    @property
    def width(self) -> int:
        """In cells."""
        return max(map(cell_len, self.lines), default=0)

    @property
    def text(self) -> str:
        """Its text, of a box with one line."""
        return self.lines[0]

    @property
    def is_empty(self) -> bool:
        return not any(self.lines)

    @property
    def flat(self) -> bool:
        return len(self.lines) == 1


def flat(text: str, kind: Kind = "ord") -> Box:
    return Box((text,), kind=kind)


EMPTY = flat("")


def in_row(boxes: Sequence[Box], kind: Kind = "row") -> Box:
    """`boxes` in a row, on one base line."""
    above = max((box.base for box in boxes), default=0)
    below = max((len(box.lines) - box.base for box in boxes), default=1)
    lines = [""] * (above + below)
    for box in boxes:
        first = above - box.base
        for n in range(len(lines)):
            inside = first <= n < first + len(box.lines)
            line = box.lines[n - first] if inside else ""
            lines[n] += _padded(line, box.width)
    return Box(tuple(lines), above, kind)


def above(boxes: Sequence[Box], base: int, kind: Kind = "ord") -> Box:
    """`boxes` below each other and centred. `base`: the number of the box that is level with the
    rest."""
    width = max(box.width for box in boxes)
    lines: list[str] = []
    level = 0
    for n, box in enumerate(boxes):
        if n == base:
            level = len(lines) + box.base
        free = (width - box.width) // 2
        lines += [_padded(" " * free + line, width) for line in box.lines]
    return Box(tuple(lines), level, kind)


def fraction(numerator: Box, denominator: Box) -> Box:
    """A fraction of two storeys. Its bar is longer than the bars of fractions in it."""
    width = max(numerator.width, denominator.width)
    bar = "─" * width
    if any(line.strip() == bar for line in (*numerator.lines, *denominator.lines)):
        bar += "──"
    return above([numerator, flat(bar), denominator], 1, "frac")


def root(of: Box) -> Box:
    """A root over several lines."""
    lines = [f"  ┌{'─' * of.width}"]
    for line in of.lines[:-1]:
        lines.append(f"  │{_padded(line, of.width)}")
    lines.append(f"╲╱│{_padded(of.lines[-1], of.width)}")
    return Box(tuple(lines), of.base + 1)


def bracketed(box: Box, left: str, right: str) -> Box:
    """`box` between brackets of its height."""
    return in_row([_side(left, box), box, _side(right, box)], "close")


def _side(sign: str, box: Box) -> Box:
    height = len(box.lines)
    if height == 1 or sign not in _TALL:
        return flat(sign)
    if height == 2 and sign in _TWO_ROWS:
        return Box(tuple(_TWO_ROWS[sign]), box.base)
    pieces = _TALL[sign]
    lines = [pieces[0], *pieces[3] * (height - 2), pieces[2]]
    if height > 2:
        lines[height // 2] = pieces[1]
    return Box(tuple(lines), box.base)


def table(rows: Sequence[Sequence[Box]], aligned: str, gap: int) -> Box:
    """Rows of cells in columns. `aligned`: of each column l, c or r; the last letter repeats."""
    n_columns = max(map(len, rows))
    filled = [[*row, *[EMPTY] * (n_columns - len(row))] for row in rows]
    widths = [0] * n_columns
    for row in filled:
        for n, cell in enumerate(row):
            widths[n] = max(widths[n], cell.width)
    lines: list[str] = []
    for row in filled:
        cells = []
        for n, cell in enumerate(row):
            side = aligned[min(n, len(aligned) - 1)]
            cells.append(_aligned(cell, widths[n], side))
            if n < n_columns - 1:
                cells.append(flat(" " * gap))
        lines += in_row(cells).lines
    return Box(tuple(lines), (len(lines) - 1) // 2, "row")


def _aligned(cell: Box, width: int, side: str) -> Box:
    free = width - cell.width
    left = {"l": 0, "c": free // 2, "r": free}[side]
    lines = tuple(_padded(" " * left + line, width) for line in cell.lines)
    return Box(lines, cell.base)


def _padded(line: str, width: int) -> str:
    return line + " " * (width - cell_len(line))


def is_operand(text: str) -> bool:
    """True if a text needs no brackets as a denominator or with an exponent."""
    if _OPERAND.fullmatch(text):
        return True
    called = _CALLED.match(text)
    if called is None:
        return False
    end = _closing(text, called.end() - 1)
    return end > 0 and _AFTER_BRACKET.fullmatch(text, end) is not None


def is_product(text: str) -> bool:
    """True if a text needs no brackets as a numerator."""
    return _PRODUCT.fullmatch(text) is not None or is_operand(text)


def _closing(text: str, opening: int) -> int:
    """The place after the bracket that closes the one at `opening`; 0 without one."""
    depth = 0
    for n in range(opening, len(text)):
        depth += (text[n] == "(") - (text[n] == ")")
        if depth == 0:
            return n + 1
    return 0


def grouped(box: Box) -> str:
    """The text of a box, in brackets if it is not one operand."""
    if box.kind == "text" or is_operand(box.text):
        return box.text
    return f"({box.text})"
