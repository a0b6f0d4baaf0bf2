"""A long text as one widget: a frame draws only the rows on screen and lays out only the last
block."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import urlsplit

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from localllm_tui.control.attachments import code_block
from localllm_tui.messages import CopyWanted
from localllm_tui.widgets.code import palette
from localllm_tui.widgets.markdown import MarkdownRow, MarkdownRows

_OPENED = ("http", "https", "mailto")


class GrowingText(Widget):
    """Markdown, or plain text (`plain`), that grows by `add`. A click on a link opens it; the mouse
    selects text."""

    DEFAULT_CSS = """
    GrowingText { height: auto; width: 1fr; }
    """

    def __init__(self, text: str = "", *, plain: bool = False, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self.rows = MarkdownRows(text, plain=plain)
        self._strips: dict[int, Strip] = {}
        self._drawn_as: tuple[int, str, Style] | None = None
        self._searched: re.Pattern[str] | None = None
        self._found_now = -1  # the row of the hit one is at

    @property
    def source(self) -> str:
        return self.rows.source

    def mark(self, searched: re.Pattern[str] | None, now: int = -1) -> list[int]:
        """Mark the hits of the search, and emphasize the row `now`; returns the rows with hits."""
        if (searched, now) != (self._searched, self._found_now):
            self._searched = searched
            self._found_now = now
            self._strips.clear()
            self.refresh()
        if searched is None or not self.size.width:
            return []
        rows = self.rows.at(self.size.width)
        return [y for y, row in enumerate(rows) if searched.search(row.text.plain)]

    def add(self, new: str) -> None:
        first = self.rows.finished  # what is before it is not laid out again
        self.rows.add(new)
        for y in [y for y in self._strips if y >= first]:
            del self._strips[y]
        width, height = self.size
        taller = not width or height != len(self.rows.at(width))
        self.refresh(Region(0, first, width, max(1, height - first)), layout=taller)

    # -- what Textual asks -------------------------------------------------------------------------

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.rows.at(width))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        rows = self.rows.at(width)
        if y >= len(rows):
            return Strip.blank(width, base)
        drawn_as = (width, self.app.theme, base)
        if drawn_as != self._drawn_as:
            self._drawn_as = drawn_as
            self._look = _look(tuple(sorted(self.app.theme_variables.items())))
            self._strips.clear()
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        if span is not None:
            return self._strip(rows[y], y, span)
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._strip(rows[y], y)
        return strip

    def _strip(self, row: MarkdownRow, y: int, selected: tuple[int, int] | None = None) -> Strip:
        width = self.size.width
        base = self.rich_style
        text = row.text
        if self._searched is not None:
            text = text.copy()
            text.highlight_regex(self._searched, "found.now" if y == self._found_now else "found")
        if selected is not None:
            text = text.copy()
            start, end = selected
            marked = self.screen.get_component_rich_style("screen--selection")
            text.stylize(marked, start, None if end == -1 else end)
        # Rendering leaves out the style of the whole text.
        whole = base + self._look.get_style(text.style)
        segments = [*Segment.apply_style(text.render(self._look, end=""), whole)]
        fill = base
        if row.fill:
            fill += self._look.get_style(row.fill)
        return Strip(segments).adjust_cell_length(width, fill).apply_offsets(0, y)

    # -- selecting and following links -------------------------------------------------------------

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The selected text as it was written: lines that are only wrapped are joined."""
        said = ""
        for y, row in enumerate(self.rows.at(self.size.width)):
            span = selection.get_span(y)
            if span is None or row.label:
                continue
            start, end = span
            if row.soft:
                start = max(start, row.lead)
            if said:
                said += " " if row.soft else "\n"
            said += row.text.plain[start : None if end == -1 else end].rstrip()
        return said, "\n"

    def action_copy_code(self, number: int) -> None:
        """Copy the code block of this number."""
        self.post_message(CopyWanted(*code_block(self.source, number, "this turn")))

    def action_link(self, address: str) -> None:
        """Open a link, if it is a web page: a model may write any address, and some start
        programs."""
        if urlsplit(address).scheme.lower() in _OPENED:
            self.app.open_url(address)
        else:
            self.notify(
                f"not opened, as it is no web page: {address}",
                severity="warning",
                timeout=6,
                markup=False,
            )


@lru_cache(maxsize=4)
def _look(variables: tuple[tuple[str, str], ...]) -> Console:
    return palette(dict(variables))
