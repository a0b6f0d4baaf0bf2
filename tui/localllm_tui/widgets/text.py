"""A widget for a long text. A frame draws only the visible rows and lays out only the last
block."""

from __future__ import annotations

import re
import time
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
from localllm_tui.messages import CopyWanted, TextGrew
from localllm_tui.widgets.code import palette
from localllm_tui.widgets.markdown import MarkdownRows
from localllm_tui.widgets.rows import CODE, MarkdownRow, Rows, copied

_OPENED = ("http", "https", "mailto")
# A long text is laid out in parts, one text at a time. Between the parts keys are handled.
_PART_S = 0.02
_NEXT_PART_S = 1 / 60
# A search lays out a text for at most so long at once. It is in seconds of processor time.
_SEARCH_S = 0.1


class _Turns:
    """Lets one text at a time work on its next part, with a pause after each part."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def taken(self) -> bool:
        """True if another text laid out a part just now."""
        return time.monotonic() < self._next_s

    def done(self) -> None:
        """Note that a part is laid out."""
        self._next_s = time.monotonic() + _NEXT_PART_S


_turns = _Turns()


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
        self._found_now = -1  # the row of the current hit
        self._goes_on = False  # the next part is about to be laid out

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
        self._rows(self.size.width)
        self._lay_out_for(_SEARCH_S)
        rows = self._rows(self.size.width)
        return [y for y, plain in enumerate(rows.plain()) if searched.search(plain)]

    def _rows(self, width: int) -> Rows:
        """The rows that are laid out. The rest follows later."""
        rows = self.rows.so_far(width)
        self._go_on()
        return rows

    def _go_on(self) -> None:
        if not self.rows.complete and not self._goes_on:
            self._goes_on = True
            self.set_timer(_NEXT_PART_S, self._lay_out_part)

    def _lay_out_part(self) -> None:
        self._goes_on = False
        if not self.size.width:
            return
        if not _turns.taken():
            self._lay_out_for(_PART_S)
            _turns.done()
        self._go_on()

    def _lay_out_for(self, cpu_s: float) -> None:
        """Lay out the next parts for so many seconds of processor time."""
        if self.rows.complete:
            return
        width = self.size.width
        first = self.rows.finished
        height = len(self.rows.so_far(width))
        self.rows.lay_out_for(cpu_s)
        self._drop_strips(first)
        self.post_message(TextGrew(self, len(self.rows.so_far(width)) - height))
        self.refresh(layout=True)

    def _drop_strips(self, first: int) -> None:
        for y in [y for y in self._strips if y >= first]:
            del self._strips[y]

    def add(self, new: str) -> None:
        first = self.rows.finished  # the text before it is not laid out again
        self.rows.add(new)
        self._drop_strips(first)
        width, height = self.size
        taller = not width or height != len(self._rows(width))
        self.refresh(Region(0, first, width, max(1, height - first)), layout=taller)

    # -- what Textual asks -------------------------------------------------------------------------

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._rows(width))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        rows = self._rows(width)
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
        style = base + self._look.get_style(text.style)
        segments = [*Segment.apply_style(text.render(self._look, end=""), style)]
        fill = base
        if row.fill:
            fill += self._look.get_style(row.fill)
        return Strip(segments).adjust_cell_length(width, fill).apply_offsets(0, y)

    # -- selecting and following links -------------------------------------------------------------

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """Return the selected text as it was written: wrapped lines are joined, and formulas and
        diagrams are their source."""
        text = ""
        drawing = ""  # the source of the row before
        blanks = ""  # at the end of the row before, if it is code
        formulas: list[object] = []
        for y, row in enumerate(self._rows(self.size.width)):
            span = selection.get_span(y)
            if span is None or row.label:
                continue
            if not row.soft:
                formulas.clear()
                text += blanks
            blanks = ""
            if drawing and row.source is drawing:
                continue
            drawing = row.source
            if text:
                text += row.gap if row.soft else "\n"
            selected = row.source or copied(row, *_selected_part(row, *span), formulas)
            text += selected.rstrip()
            if row.fill == CODE:
                blanks = selected[len(selected.rstrip()) :]
        text += blanks
        return text, "\n"

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
                f"not opened, because it is not a web page: {address}",
                severity="warning",
                timeout=6,
                markup=False,
            )


def _selected_part(row: MarkdownRow, start: int, end: int) -> tuple[int, int]:
    """The part of a row that belongs to the text, of a selection from `start` to `end` (-1: the end
    of the row)."""
    if end == -1:
        end = len(row.text)
    if row.soft or row.fill == CODE:
        start = max(start, row.lead)
    return start, end


@lru_cache(maxsize=4)
def _look(variables: tuple[tuple[str, str], ...]) -> Console:
    return palette(dict(variables))
