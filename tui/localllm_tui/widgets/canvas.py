"""A grid of characters on which diagrams are drawn: texts, and lines that join."""

from __future__ import annotations

from rich.cells import cell_len

_UP = 1
_DOWN = 2
_LEFT = 4
_RIGHT = 8
# The sign of each sum of directions.
_SIGNS = " │││─┘┐┤─└┌├─┴┬┼"


class Canvas:
    """`width` x `height` cells. Lines of one connection join, and lines of others cross them."""

    def __init__(self, width: int, height: int) -> None:
        self._cells = [[" "] * width for _ in range(height)]
        self._lines: dict[tuple[int, int], int] = {}  # the directions of the line in each cell

    def put(self, x: int, y: int, text: str) -> None:
        """Write `text` from a cell on, over what is there."""
        row = self._cells[y]
        for sign in text:
            wide = cell_len(sign)
            if wide == 0 and x:
                row[x - 1] += sign
                continue
            row[x] = sign
            self._lines.pop((x, y), None)
            if wide == 2:
                row[x + 1] = ""
            x += max(1, wide)

    def down(self, x: int, first: int, last: int) -> None:
        """A vertical line between two rows. It interrupts horizontal lines."""
        for y in range(first, last + 1):
            directions = 0
            if y > first:
                directions |= _UP
            if y < last:
                directions |= _DOWN
            self._join(x, y, directions, _UP | _DOWN)

    def across(self, y: int, first: int, last: int) -> None:
        """A horizontal line between two columns. Vertical lines interrupt it."""
        for x in range(first, last + 1):
            directions = 0
            if x > first:
                directions |= _LEFT
            if x < last:
                directions |= _RIGHT
            self._join(x, y, directions, _LEFT | _RIGHT)

    def _join(self, x: int, y: int, directions: int, both: int) -> None:
        known = self._lines.get((x, y), 0)
        passing = known in (_UP | _DOWN, _LEFT | _RIGHT) and directions == both
        if passing and known != directions:
            directions = _UP | _DOWN
        else:
            directions |= known
        self._lines[x, y] = directions
        self._cells[y][x] = _SIGNS[directions]

    def rows(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._cells]
