"""Tokens per second over depth, drawn in characters: what was measured, and the prediction it is
held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LEFT = 8


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """Tokens/s at a depth in tokens; `predicted` None where nothing was."""

    depth: int
    tok_s: float
    predicted: float | None = None


def lines(points: Sequence[PlotPoint], width: int = 72, height: int = 12) -> list[str]:
    """The picture: a column for each depth's logarithm, rows from 0 up; `●` measured, `·`
    predicted, `◉` both."""
    if not points:
        return []
    columns = max(8, width - _LEFT)
    placed = _columns([p.depth for p in points], columns)
    predictions = [
        (column, p.predicted)
        for column, p in zip(placed, points, strict=True)
        if p.predicted is not None
    ]
    top = max([p.tok_s for p in points] + [value for _, value in predictions]) * 1.05 or 1.0

    def row(value: float) -> int:
        return min(height - 1, max(0, round((1 - value / top) * (height - 1))))

    grid = [[" "] * columns for _ in range(height)]
    for column, predicted in predictions:
        grid[row(predicted)][column] = "·"
    for column, point in zip(placed, points, strict=True):
        cells = grid[row(point.tok_s)]
        cells[column] = "◉" if cells[column] == "·" else "●"
    said = ["tok/s over tokens of context: ● measured  · predicted  ◉ both"]
    for i, cells in enumerate(grid):
        mark = f"{top * (1 - i / (height - 1)):6.4g}" if i in (0, height // 2, height - 1) else ""
        said.append(f"{mark:>6} │{''.join(cells)}".rstrip())
    return [*said, f"{'':6} └{'─' * columns}", f"{'':8}{_labels(placed, points, columns)}".rstrip()]


def _columns(depths: Sequence[int], columns: int) -> list[int]:
    """Where each depth stands among so many columns, by its logarithm."""
    at = [math.log2(max(1, depth)) for depth in depths]
    low, spread = min(at), max(at) - min(at)
    return [round((x - low) / spread * (columns - 1)) if spread else columns // 2 for x in at]


def _labels(placed: Sequence[int], points: Sequence[PlotPoint], columns: int) -> str:
    """Depths below their columns; one that would touch another is left out."""
    cells = [" "] * (columns + 8)
    for column, point in zip(placed, points, strict=True):
        text = _short(point.depth)
        begin = min(max(0, column - len(text) // 2), columns - len(text))
        room = cells[max(0, begin - 1) : begin + len(text) + 1]
        if not "".join(room).strip():
            cells[begin : begin + len(text)] = text
    return "".join(cells)


def _short(depth: int) -> str:
    return f"{depth / 1024:.0f}k" if depth >= 1024 else str(depth)
