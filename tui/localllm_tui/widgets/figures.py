"""The figures around the conversation: the status line below it, the head line above it, the panel
at its right."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.text import Text
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
        least = 1 if busy else 0
        while len(shown_parts) > least and cell_len(_HEAD_GAP.join(shown_parts)) > free_width:
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


class GlassPanel(Static):
    """Shows the last values of `show`, with bold headings and bars in the theme's accent; hidden
    until asked for. `narrow`: above the conversation."""

    DEFAULT_CSS = f"""
    GlassPanel {{
        dock: right; width: {PANEL_WIDTH + 6}; height: 1fr; padding: 1 2; display: none;
        border-left: solid $panel; overflow-y: auto; text-wrap: nowrap;
    }}
    GlassPanel.wanted {{ display: block; }}
    GlassPanel.narrow {{
        dock: top; width: 100%; height: auto; max-height: 50%; padding: 0 1;
        border-left: none; border-bottom: solid $panel;
    }}
    """

    def show(self, lines: list[str]) -> None:
        text = Content("\n".join(lines)).highlight_regex(r"(?m)^[A-Z]{4,}[A-Z ]*", style="bold")
        if text != self.content:
            self.update(text.highlight_regex("[▁-▏]+", style="$accent-text"))
