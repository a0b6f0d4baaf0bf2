"""Draw the pictures in docs/pictures from the snapshots of the tests.

Each screen has one sheet with all of its sizes, dark and light. `python -m tui.pictures` in
tests/ draws them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

from rich.cells import cell_len

SNAPSHOTS = Path(__file__).parent / "snapshots"
PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SIZES = ("120x40", "80x24", "40x20")
# Pixels of a cell's width and height, of a letter's baseline, and between two screens.
CELL_X, CELL_Y, LETTERS, GAP = 7.2, 15, 12, 16
# The colours drawn for a terminal's own foreground and background.
_DEFAULTS = {"dark": ("#e0e0e0", "#121212"), "light": ("#1f1f1f", "#e0e0e0")}
_MARKS = {
    "bold": "font-weight:bold",
    "italic": "font-style:italic",
    "underline": "text-decoration:underline",
    "strike": "text-decoration:line-through",
    "dim": "opacity:.6",
}


@dataclass(frozen=True)
class Screen:
    """A snapshot: its lines, and a letter for each cell, whose style is in `looks`."""

    lines: list[str]
    styles: list[str]
    looks: dict[str, str]
    ground: str


def read(name: str, size: str, look: str) -> Screen:
    """Read the screen of this name. A light screen has the text of the dark one."""
    height = int(size.partition("x")[2])
    text = (SNAPSHOTS / f"{name}-{size}.txt").read_text(encoding="utf-8").split("\n")
    said = text[height + 1 :]
    if look == "light":
        said = (SNAPSHOTS / f"{name}-{size}-light.txt").read_text(encoding="utf-8").split("\n")
    legend = dict(line.split(" = ", 1) for line in said[height:] if line)
    return Screen(text[:height], said[:height], legend, legend.pop("ground"))


def sheet(name: str) -> str:
    """Return one SVG with the screen in all sizes: dark on the left, light on the right."""
    parts, top, width = [], float(GAP), 0.0
    for size in SIZES:
        columns, rows = (int(n) for n in size.split("x"))
        for n, look in enumerate(("dark", "light")):
            left = GAP + n * (columns * CELL_X + GAP)
            parts.append(f'<g transform="translate({left:g} {top:g})">')
            parts += _drawn(read(name, size, look), columns, rows, look)
            parts.append("</g>")
            width = max(width, left + columns * CELL_X + GAP)
        top += rows * CELL_Y + GAP
    return _svg(parts, width, top)


def _svg(parts: list[str], width: float, height: float) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'font-family="Fira Code, Menlo, Consolas, DejaVu Sans Mono, monospace" '
        f'font-size="{LETTERS}" xml:space="preserve">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _drawn(screen: Screen, columns: int, rows: int, look: str) -> Iterator[str]:
    _, ground = _colours(screen.looks[screen.ground], look)
    yield f'<rect width="{columns * CELL_X:g}" height="{rows * CELL_Y}" fill="{ground}"/>'
    for y, (line, styles) in enumerate(zip(screen.lines, screen.styles, strict=True)):
        cells = [*_cells(line, styles, screen.ground)]
        x = 0
        for behind, run in groupby(cells, lambda cell: _colours(screen.looks[cell[1]], look)[1]):
            width = sum(cell_len(letter) for letter, _ in run)
            if behind != ground:
                place = f'x="{x * CELL_X:g}" y="{y * CELL_Y}"'
                size = f'width="{width * CELL_X:g}" height="{CELL_Y}"'
                yield f'<rect {place} {size} fill="{behind}"/>'
            x += width
        x = 0
        for mark, run in groupby(cells, lambda cell: cell[1]):
            text = "".join(letter for letter, _ in run)
            yield from _run(text, screen.looks[mark], x, y, look)
            x += cell_len(text)


def _cells(line: str, styles: str, ground: str) -> Iterator[tuple[str, str]]:
    """Yield each character of a line with the letter of its style. Combined characters are one."""
    x = 0
    for letter in line:
        yield letter, styles[x] if x < len(styles) else ground
        x += cell_len(letter)
    for mark in styles[x:]:
        yield " ", mark


def _colours(style: str, look: str) -> tuple[str, str]:
    said, _, ground = style.rpartition(" on ")
    front = said.rpartition(" ")[2]
    own = _DEFAULTS[look]
    shown = (own[0] if front == "default" else front, own[1] if ground == "default" else ground)
    return (shown[1], shown[0]) if "reverse" in said.split() else shown


def _run(text: str, style: str, x: int, y: int, look: str) -> Iterator[str]:
    """Yield the SVG of a text in one style."""
    front, _ = _colours(style, look)
    said = text.rstrip()
    if said:
        x += cell_len(said) - cell_len(said.lstrip())
        said = said.lstrip()
        marks = ";".join(_MARKS[word] for word in style.split() if word in _MARKS)
        drawn = f' style="{marks}"' if marks else ""
        yield (
            f'<text x="{x * CELL_X:g}" y="{y * CELL_Y + LETTERS}" fill="{front}"{drawn} '
            f'textLength="{cell_len(said) * CELL_X:g}">{escape(said, quote=False)}</text>'
        )


def pictures() -> dict[Path, str]:
    """Return every picture by its path. (The README's picture is a screenshot of a real chat.)"""
    names = sorted(file.name.removesuffix("-80x24.txt") for file in SNAPSHOTS.glob("*-80x24.txt"))
    return {PICTURES / f"{name}.svg": sheet(name) for name in names}


def main() -> None:
    drawn = pictures()
    for old in {*PICTURES.glob("*.svg")} - drawn.keys():
        old.unlink()
    for path, svg in drawn.items():
        path.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
