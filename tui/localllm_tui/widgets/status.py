"""The status line: an answer's numbers in as many words as its own width has room for, whatever takes or gives it room."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.widget import Widget

from localllm_tui.control.meter import Numbers, status_text

_LEAST_COLUMNS = 10


class StatusLine(Widget):
    """Shows what `show` was last told, fitted anew when its width changes."""

    DEFAULT_CSS = "StatusLine { height: 1; padding: 0 2; text-style: dim; }"

    def __init__(self) -> None:
        super().__init__(id="status")
        self._numbers: Numbers | None = None

    def show(self, numbers: Numbers) -> None:
        """Show these numbers."""
        if numbers != self._numbers:
            self._numbers = numbers
            self.refresh()

    def on_resize(self, _: events.Resize) -> None:
        self.refresh()

    def render(self) -> Text:
        width = max(_LEAST_COLUMNS, self.content_size.width)
        return Text(status_text(self._numbers, width) if self._numbers is not None else "", no_wrap=True)
