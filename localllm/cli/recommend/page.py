"""The page `recommend` writes on: plain lines as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localllm.formatting import rate

if TYPE_CHECKING:
    from localllm.planner.types import Range

# Narrower than this tables can't be read anyway; wider than this sentences can't.
_NARROWEST = 60
_WIDEST = 160
BAR = 10


def out(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def width() -> int:
    """Columns to fill: the terminal's, or 80 where there is none (COLUMNS says otherwise)."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size().columns))


def wrapped(text: str, first: str = "", further: str = "") -> list[str]:
    return textwrap.wrap(
        text, width(), initial_indent=first, subsequent_indent=further, break_on_hyphens=False
    )


def paragraph(text: str) -> list[str]:
    """`text` wrapped, with all lines but the first indented."""
    return wrapped(text, further="  ")


def bar(share: float, width: int = BAR) -> str:
    """A bar of `width` characters filled to `share` (clamped to 0..1; any use at all shows one
    block)."""
    filled = round(max(0.0, min(1.0, share)) * width)
    if filled == 0 and share > 0:
        filled = 1
    return "█" * filled + "░" * (width - filled)


def clip(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    return text[: width - 1] + "…"


def speed(value: Range) -> str:
    return f"{rate(value.low)}–{rate(value.high)}"
