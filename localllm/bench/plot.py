"""Tokens per second over depth, drawn in characters: what was measured, and the prediction it is held against."""

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
    """The picture: a column for each depth's logarithm, rows from 0 up; `●` measured, `·` predicted, `◉` both."""
    if not points:
        return []
    values = [p.tok_s for p in points] + [p.predicted for p in points if p.predicted is not None]
    top = max(values) * 1.05 or 1.0
    low, high = (math.log2(max(1, f(p.depth for p in points))) for f in (min, max))
    columns = max(8, width - _LEFT)
    grid = [[" "] * columns for _ in range(height)]

    def column(depth: float) -> int:
        return round((math.log2(max(1, depth)) - low) / (high - low) * (columns - 1)) if high > low else columns // 2

    def row(value: float) -> int:
        return min(height - 1, max(0, round((1 - value / top) * (height - 1))))

    for p in points:
        if p.predicted is not None:
            grid[row(p.predicted)][column(p.depth)] = "·"
    for p in points:
        at = grid[row(p.tok_s)]
        at[column(p.depth)] = "◉" if at[column(p.depth)] == "·" else "●"
    said = ["tok/s over tokens of context: ● measured  · predicted  ◉ both"]
    for i, cells in enumerate(grid):
        mark = f"{top * (1 - i / (height - 1)):6.4g}" if i in (0, height // 2, height - 1) else ""
        said.append(f"{mark:>6} │{''.join(cells)}".rstrip())
    said.append(f"{'':6} └{'─' * columns}")
    foot = [" "] * (columns + 8)
    for p in points:
        text = _short(p.depth)
        begin = min(max(0, column(p.depth) - len(text) // 2), columns - len(text))
        if all(c == " " for c in foot[max(0, begin - 1) : begin + len(text) + 1]):
            foot[begin : begin + len(text)] = text
    said.append(f"{'':8}{''.join(foot)}".rstrip())
    return said


def _short(depth: int) -> str:
    return f"{depth / 1024:.0f}k" if depth >= 1024 else str(depth)
