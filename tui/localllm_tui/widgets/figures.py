"""The figures around the conversation: the status line below it, the head line above it, the panel
at its right."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from localllm_tui.control.formatting import elide
from localllm_tui.control.meter import status_text
from localllm_tui.control.physics import PANEL_WIDTH
from localllm_tui.control.terminal import one_line, printable

_MIN_COLUMNS = 10


class StatusLine(Widget):
    """Shows the last values of `show`, fitted again after a change of width."""

    DEFAULT_CSS = "StatusLine { height: 1; padding: 0 2; color: $hint; }"
    _numbers: dict[str, Any] | None = None

    def show(self, **numbers: Any) -> None:
        if numbers != self._numbers:
            self._numbers = numbers
            self.refresh()

    def render(self) -> Text:
        if self._numbers is None:
            return Text("")
        width = max(_MIN_COLUMNS, self.content_size.width)
        return Text(status_text(width, **self._numbers), no_wrap=True)


_HEAD_GAP = " · "
# At least this much of a system prompt is shown.
_MIN_SYSTEM_CELLS = 24


class HeadLine(Static):
    """The conversation's title, which server answers and how, and the system prompt; hidden when
    empty."""

    DEFAULT_CSS = """
    HeadLine { height: 1; padding: 0 2; color: $hint; text-wrap: nowrap; text-overflow: ellipsis; display: none; }
    HeadLine.-busy { color: $accent-text; }
    """

    def show(
        self, parts: list[str], system: str, *, busy: bool, width: int, title: str = ""
    ) -> None:
        """Show `title`, `parts` and the system prompt within `width` cells.

        If space is short, the last parts are omitted first. `busy`: the user waits for something.
        """
        free_width = width - 4
        title = elide(one_line(title), max(16, width // 3))
        if title:
            free_width -= cell_len(title) + len(_HEAD_GAP)
        prompt = ""
        if system:
            prompt = f"system: {one_line(system)}"
            free_width -= len(prompt[:_MIN_SYSTEM_CELLS]) + len(_HEAD_GAP)
        shown_parts = [printable(part) for part in parts if part]
        min_rows = 1 if busy else 0
        while len(shown_parts) > min_rows and cell_len(_HEAD_GAP.join(shown_parts)) > free_width:
            shown_parts.pop()  # omit the entire part, because half a fact is useless
        text = elide(_HEAD_GAP.join(shown_parts), max(8, free_width))
        line = _HEAD_GAP.join(part for part in (text, prompt) if part)
        gap = _HEAD_GAP if title and line else ""
        shown = Text.assemble((title, "bold"), gap, line)
        self.set_class(busy, "-busy")
        self.display = bool(shown.plain)
        if shown != self.content:
            self.update(shown)


# On a narrower screen, the panel would leave the conversation less than 60 columns.
MIN_COLUMNS = 100
_COLUMN_GAP = 2
# So many lines are shown as they are, above the conversation too.
_FEW_LINES = 10


class GlassPanel(VerticalScroll, can_focus=False):
    """Shows the last values of `show`, with bold headings and bars in the theme's accent; hidden
    until asked for. `narrow`: above the conversation, in two columns if they fit."""

    DEFAULT_CSS = f"""
    GlassPanel {{
        dock: right; width: {PANEL_WIDTH + 6}; height: 1fr; padding: 1 2; display: none;
        border-left: solid $panel;
    }}
    GlassPanel > Static {{ height: auto; text-wrap: nowrap; text-overflow: clip; }}
    GlassPanel.wanted {{ display: block; }}
    GlassPanel.narrow {{
        dock: top; width: 100%; height: auto; max-height: 55%; padding: 0 1;
        border-left: none; border-bottom: solid $panel;
    }}
    """
    _lines: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def on_resize(self) -> None:
        self._draw()

    def show(self, lines: list[str]) -> None:
        if tuple(lines) != self._lines:
            self._lines = tuple(lines)
            self._draw()

    def _draw(self) -> None:
        lines = list(self._lines)
        if self.has_class("narrow") and len(lines) > _FEW_LINES:
            free_width = self.outer_size.width - self.styles.gutter.width
            columns = (free_width + _COLUMN_GAP) // (PANEL_WIDTH + _COLUMN_GAP)
            lines = in_columns(lines, columns)
        text = Content("\n".join(lines)).highlight_regex(r"\b[A-Z]{4,}[A-Z ]*(?!\w)", style="bold")
        self.query_one(Static).update(text.highlight_regex("[▁-▏]+", style="$accent-text"))


def in_columns(lines: Sequence[str], columns: int) -> list[str]:
    """Blocks of lines (an empty line ends one) without the empty lines: in one column, or in two of
    about the same height."""
    blocks = [block.split("\n") for block in "\n".join(lines).split("\n\n")]
    joined = [line for line in lines if line]
    if columns < 2:
        return joined
    left: list[str] = []
    for block in blocks:
        if left and len(left) + len(block) > (len(joined) + 1) // 2:
            break
        left += block
    right = joined[len(left) :]
    rows = zip_longest(left, right, fillvalue="")
    width = PANEL_WIDTH + _COLUMN_GAP
    return [f"{a:{width}}{b}".rstrip() for a, b in rows]
