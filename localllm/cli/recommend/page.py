"""Text output of `recommend`, as wide as the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from localllm.formatting import rate
from localllm.plain_output import print_lines

if TYPE_CHECKING:
    from localllm.planner.types import Range

# Tables can't be read on a narrower terminal, and sentences can't be on a wider one.
_MIN_COLUMNS = 60
_MAX_COLUMNS = 160
BAR_COLUMNS = 10


def print_page(lines: Iterable[str]) -> None:
    print_lines(lines)


def width() -> int:
    """Width in columns: COLUMNS if set, or the terminal's, or 80 without a terminal."""
    return max(_MIN_COLUMNS, min(_MAX_COLUMNS, shutil.get_terminal_size().columns))


def wrapped(text: str, first: str = "", further: str = "") -> list[str]:
    return textwrap.wrap(
        text, width(), initial_indent=first, subsequent_indent=further, break_on_hyphens=False
    )


def paragraph(text: str) -> list[str]:
    """Wrap `text`. All lines but the first are indented."""
    return wrapped(text, further="  ")


def bar(share: float, width: int = BAR_COLUMNS) -> str:
    """Return a bar of `width` characters filled to `share`.

    `share` is clamped to 0..1. Any share above 0 fills at least one block.
    """
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
