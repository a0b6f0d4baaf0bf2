"""The roofline of a machine with plans on it, drawn as terminal text or SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter

from localllm.device.types import Device
from localllm.planner import efficiency
from localllm.planner.bytes_per_token import streamed
from localllm.planner.types import Plan


@dataclass(frozen=True, slots=True)
class Roofline:
    """Decode tokens/s over GB read per token, log-log. The roof is bandwidth ÷ bytes; compute
    limits are not drawn.

    - `x_decades`, `y_decades`: the powers of ten at the ends of the axes.
    - `points`: (GB a token, predicted tokens/s, name) of each plan.
    """

    title: str
    note: str
    bandwidth_gbps: float
    x_decades: tuple[int, int]
    y_decades: tuple[int, int]
    points: tuple[tuple[float, float, str], ...]

    def at(self, gb_per_token: float, tok_s: float) -> tuple[float, float]:
        """Return the point's position: shares of the width from the left, and of the height from
        the top."""
        x0, x1 = self.x_decades
        y0, y1 = self.y_decades
        right = (math.log10(gb_per_token) - x0) / (x1 - x0)
        down = (y1 - math.log10(tok_s)) / (y1 - y0)
        return right, down


def of(device: Device, plans: Sequence[Plan]) -> Roofline:
    """Return the roofline of `device` with `plans` on it."""
    bandwidth = device.bandwidth_gbps.value
    basis = device.bandwidth_gbps.basis
    tflops, _ = efficiency.nominal_tflops(device)
    points = []
    for plan in plans:
        gb_per_token = streamed(plan.model, plan.variant).total_bytes / 1e9
        name = f"{plan.model.name} {plan.variant.quant}"
        points.append((gb_per_token, plan.decode_tok_s.value, name))
    gb_values = [x for x, _, _ in points] or [1.0]
    tok_s_values = [y for _, y, _ in points] + [bandwidth / x for x in gb_values]
    return Roofline(
        title=f"Decode roofline of {device.name}",
        note=f"memory {bandwidth:,.0f} GB/s ({basis}); nominal FP16 {tflops:,.1f} TFLOP/s",
        bandwidth_gbps=bandwidth,
        x_decades=_decades(min(gb_values) * 0.9, max(gb_values) * 1.1),
        y_decades=_decades(max(min(tok_s_values), 0.01), max(tok_s_values)),
        points=tuple(points),
    )


def _decades(least: float, most: float) -> tuple[int, int]:
    """Return the powers of ten around both."""
    return math.floor(math.log10(least)), math.ceil(math.log10(most))


def text(picture: Roofline, width: int = 78, height: int = 18) -> list[str]:
    """Return the picture in characters: the roof as dots, plans as their numbers, then the legend."""
    columns = width - 8
    x0, x1 = picture.x_decades
    y0, y1 = picture.y_decades
    lines = [picture.title, picture.note, "tok/s"]
    for row, cells in enumerate(_grid(picture, columns, height)):
        mark = " " * 6
        if row in (0, height // 2, height - 1):
            value = 10 ** (y1 - (y1 - y0) * row / (height - 1))
            mark = f"{value:6.4g}"
        lines.append(f"{mark} |{''.join(cells)}".rstrip())
    left = f"{10.0**x0:g}"
    right_end = f"{10.0**x1:g} GB per token"
    lines += [
        "       +" + "─" * columns,
        "        " + left + right_end.rjust(columns - len(left)),
        "· roof: bandwidth divided by bytes read per token",
    ]
    for i, (gb_per_token, tok_s, label) in enumerate(picture.points, 1):
        share = tok_s * gb_per_token / picture.bandwidth_gbps
        figures = f"{gb_per_token:.2f} GB, {tok_s:.0f} tok/s, {share:.0%} of the roof"
        lines.append(f"{i}  {label[: width - len(figures) - 5]}: {figures}")
    return lines


def _grid(picture: Roofline, columns: int, rows: int) -> list[list[str]]:
    """Return the roof and the plans' numbers, as characters by row and column."""
    x0, x1 = picture.x_decades
    grid = [[" "] * columns for _ in range(rows)]
    for column in range(columns):
        x = 10 ** (x0 + (x1 - x0) * column / (columns - 1))
        _, down = picture.at(x, picture.bandwidth_gbps / x)
        row = round(down * (rows - 1))
        if 0 <= row < rows:
            grid[row][column] = "·"
    for i, (gb_per_token, tok_s, _) in enumerate(picture.points, 1):
        right, down = picture.at(gb_per_token, tok_s)
        column = round(right * (columns - 1))
        row = round(down * (rows - 1))
        while grid[row][column] not in " ·" and column < columns - 1:
            column += 1
        grid[row][column] = str(i % 10)
    return grid


# Width, height and margins (left, top, right, bottom) of the picture, in pixels.
_WIDTH_PX = 880
_HEIGHT_PX = 560
_LEFT = 70
_TOP = 60
_RIGHT = 30
_BOTTOM = 60
_LABEL_GAP = 13.0


def _pixel(picture: Roofline, x: float, y: float) -> tuple[float, float]:
    """Return the pixel of a point in data coordinates."""
    right, down = picture.at(x, y)
    return _LEFT + right * (_WIDTH_PX - _LEFT - _RIGHT), _TOP + down * (_HEIGHT_PX - _TOP - _BOTTOM)


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(content)}</text>'


def _line(
    start: tuple[float, float], end: tuple[float, float], colour: str, stroke_width: int = 1
) -> str:
    x1, y1 = start
    x2, y2 = end
    stroke = f'stroke="{colour}"'
    if stroke_width != 1:
        stroke += f' stroke-width="{stroke_width}"'
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}/>'


def svg(picture: Roofline) -> str:
    """Return the picture as a standalone SVG document."""
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH_PX}" height="{_HEIGHT_PX}" '
        f'viewBox="0 0 {_WIDTH_PX} {_HEIGHT_PX}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH_PX}" height="{_HEIGHT_PX}" fill="white"/>',
        _text(_LEFT, 24, picture.title, 'font-size="16"'),
        _text(_LEFT, 44, picture.note, 'fill="#555"'),
        _text(
            _WIDTH_PX / 2, _HEIGHT_PX - 16, "GB of weights read per token", 'text-anchor="middle"'
        ),
        _text(16, _TOP - 8, "tok/s"),
    ]
    x0, x1 = picture.x_decades
    y0, y1 = picture.y_decades
    for decade in range(x0, x1 + 1):
        x, _ = _pixel(picture, 10.0**decade, 10.0**y0)
        elements.append(_line((x, _TOP), (x, _HEIGHT_PX - _BOTTOM), "#ddd"))
        elements.append(
            _text(x, _HEIGHT_PX - _BOTTOM + 18, f"{10.0**decade:g}", 'text-anchor="middle"')
        )
    for decade in range(y0, y1 + 1):
        _, y = _pixel(picture, 10.0**x0, 10.0**decade)
        elements.append(_line((_LEFT, y), (_WIDTH_PX - _RIGHT, y), "#ddd"))
        elements.append(_text(_LEFT - 8, y + 4, f"{10.0**decade:g}", 'text-anchor="end"'))
    bandwidth = picture.bandwidth_gbps
    first = max(10.0**x0, bandwidth / 10.0**y1)
    last = min(10.0**x1, bandwidth / 10.0**y0)
    start = _pixel(picture, first, bandwidth / first)
    end = _pixel(picture, last, bandwidth / last)
    elements.append(_line(start, end, "#c0392b", stroke_width=2))
    labelled_points = [(*_pixel(picture, x, y), label) for x, y, label in picture.points]
    labelled_points.sort(key=itemgetter(1, 0))
    next_y = -math.inf
    for x, y, label in labelled_points:
        next_y = max(y, next_y + _LABEL_GAP)  # labels must not overlap
        elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#2c5f8a"/>')
        elements.append(_text(x + 9, next_y + 4, label))
    return "\n".join([*elements, "</svg>"]) + "\n"
