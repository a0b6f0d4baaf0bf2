"""The roofline of a machine with plans on it: data here, drawn as terminal text or SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from localllm.device.types import Device
from localllm.planner import decode_cost, efficiency
from localllm.planner.streams import streamed
from localllm.planner.types import Plan


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """One plan: weight bytes a token reads (GB), predicted tokens/s, and its number in the
    legend."""

    gb_per_token: float
    tok_s: float
    label: str


@dataclass(frozen=True, slots=True)
class Roofline:
    """Decode tokens/s over GB read per token. The roof is bandwidth ÷ bytes; above `flat_tok_s`
    compute would bound."""

    title: str
    bandwidth_gbps: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    points: tuple[RooflinePoint, ...]
    note: str


def of(device: Device, plans: Sequence[Plan]) -> Roofline:
    """The roofline of `device` with `plans` on it (log-log)."""
    bandwidth, basis = decode_cost.bandwidth_of(device)
    tflops, _ = efficiency.nominal_tflops(device)
    points = tuple(
        RooflinePoint(
            streamed(p.model, p.variant).total_bytes / 1e9,
            p.decode_tok_s.value,
            f"{p.model.name} {p.variant.quant}",
        )
        for p in plans
    )
    xs = [p.gb_per_token for p in points] or [1.0]
    x0, x1 = 10 ** math.floor(math.log10(min(xs) * 0.9)), 10 ** math.ceil(math.log10(max(xs) * 1.1))
    ys = [p.tok_s for p in points] + [bandwidth / x for x in xs]
    y0, y1 = 10 ** math.floor(math.log10(max(min(ys), 0.01))), 10 ** math.ceil(math.log10(max(ys)))
    note = f"memory {bandwidth:,.0f} GB/s ({basis}); nominal FP16 {tflops:,.1f} TFLOP/s"
    return Roofline(
        f"Decode roofline of {device.name}", bandwidth, (x0, x1), (y0, y1), points, note
    )


def _unit(value: float, span: tuple[float, float]) -> float:
    low, high = math.log10(span[0]), math.log10(span[1])
    return (math.log10(value) - low) / (high - low)


def text(picture: Roofline, width: int = 78, height: int = 18) -> list[str]:
    """The picture in characters: the roof as dots, plans as their numbers, then the legend."""
    columns, rows = width - 8, height
    grid = [[" "] * columns for _ in range(rows)]
    for column in range(columns):
        low, high = (math.log10(v) for v in picture.x_range)
        x = 10 ** (low + (high - low) * column / (columns - 1))
        row = round((1 - _unit(picture.bandwidth_gbps / x, picture.y_range)) * (rows - 1))
        if 0 <= row < rows:
            grid[row][column] = "·"
    for i, point in enumerate(picture.points, 1):
        column = round(_unit(point.gb_per_token, picture.x_range) * (columns - 1))
        row = round((1 - _unit(point.tok_s, picture.y_range)) * (rows - 1))
        while grid[row][column] not in " ·" and column < columns - 1:
            column += 1
        grid[row][column] = str(i % 10)
    lines = [picture.title, picture.note, "tok/s"]
    for r, cells in enumerate(grid):
        low, high = (math.log10(v) for v in picture.y_range)
        value = 10 ** (high - (high - low) * r / (rows - 1))
        mark = f"{value:6.4g}" if r in (0, rows - 1) or r == rows // 2 else " " * 6
        lines.append(f"{mark} |{''.join(cells)}".rstrip())
    lines.append("       +" + "─" * columns)
    left, right = f"{picture.x_range[0]:g}", f"{picture.x_range[1]:g} GB per token"
    lines.append("        " + left + right.rjust(columns - len(left)))
    lines.append("· roof: bandwidth divided by bytes read per token")
    for i, p in enumerate(picture.points, 1):
        share = p.tok_s * p.gb_per_token / picture.bandwidth_gbps
        figures = f"{p.gb_per_token:.2f} GB, {p.tok_s:.0f} tok/s, {share:.0%} of the roof"
        lines.append(f"{i}  {p.label[: width - len(figures) - 5]}: {figures}")
    return lines


# Width, height and margins (left, top, right, bottom) of the picture, in pixels.
_W, _H, _LEFT, _TOP, _RIGHT, _BOTTOM = 880, 560, 70, 60, 30, 60
_LABEL_GAP = 13.0


def _place(picture: Roofline, x: float, y: float) -> tuple[float, float]:
    """Pixel of a point in data coordinates."""
    return (
        _LEFT + _unit(x, picture.x_range) * (_W - _LEFT - _RIGHT),
        _TOP + (1 - _unit(y, picture.y_range)) * (_H - _TOP - _BOTTOM),
    )


def _decades(span: tuple[float, float]) -> list[float]:
    """The powers of ten of an axis."""
    first, last = round(math.log10(span[0])), round(math.log10(span[1]))
    return [10.0**e for e in range(first, last + 1)]


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'


def _line(start: tuple[float, float], end: tuple[float, float], stroke: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"/>'


def svg(picture: Roofline) -> str:
    """The picture as a standalone SVG document."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_W}" height="{_H}" '
        f'viewBox="0 0 {_W} {_H}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_W}" height="{_H}" fill="white"/>',
        _text(_LEFT, 24, picture.title, 'font-size="16"'),
        _text(_LEFT, 44, picture.note, 'fill="#555"'),
        _text(_W / 2, _H - 16, "GB of weights read per token", 'text-anchor="middle"'),
        _text(16, _TOP - 8, "tok/s"),
    ]
    for value in _decades(picture.x_range):
        x, _ = _place(picture, value, picture.y_range[0])
        out.append(_line((x, _TOP), (x, _H - _BOTTOM), "#ddd"))
        out.append(_text(x, _H - _BOTTOM + 18, f"{value:g}", 'text-anchor="middle"'))
    for value in _decades(picture.y_range):
        _, y = _place(picture, picture.x_range[0], value)
        out.append(_line((_LEFT, y), (_W - _RIGHT, y), "#ddd"))
        out.append(_text(_LEFT - 8, y + 4, f"{value:g}", 'text-anchor="end"'))
    bandwidth = picture.bandwidth_gbps
    enters = max(picture.x_range[0], bandwidth / picture.y_range[1])
    leaves = min(picture.x_range[1], bandwidth / picture.y_range[0])
    start, end = (_place(picture, x, bandwidth / x) for x in (enters, leaves))
    out.append(_line(start, end, '#c0392b" stroke-width="2'))
    spots = [(*_place(picture, p.gb_per_token, p.tok_s), p.label) for p in picture.points]
    below = -math.inf
    for x, y, label in sorted(spots, key=lambda spot: (spot[1], spot[0])):
        below = max(y, below + _LABEL_GAP)  # no label lies on another
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2c5f8a"/>')
        out.append(_text(x + 9, below + 4, label))
    return "\n".join([*out, "</svg>"]) + "\n"
