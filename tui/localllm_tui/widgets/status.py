"""The status line below the conversation and the head line above it."""

from __future__ import annotations

from rich.cells import cell_len
from rich.text import Text
from textual import events
from textual.widget import Widget
from textual.widgets import Static

from localllm_tui.control.formatting import elide
from localllm_tui.control.meter import StatusFigures, status_text
from localllm_tui.control.terminal import one_line, printable

_LEAST_COLUMNS = 10


class StatusLine(Widget):
    """Shows what `show` was last told, fitted anew when its width changes."""

    DEFAULT_CSS = "StatusLine { height: 1; padding: 0 2; color: $hint; }"

    def __init__(self) -> None:
        super().__init__(id="status")
        self._numbers: StatusFigures | None = None

    def show(self, numbers: StatusFigures) -> None:
        if numbers != self._numbers:
            self._numbers = numbers
            self.refresh()

    def on_resize(self, _: events.Resize) -> None:
        self.refresh()

    def render(self) -> Text:
        width = max(_LEAST_COLUMNS, self.content_size.width)
        return Text(status_text(self._numbers, width) if self._numbers is not None else "", no_wrap=True)


_HEAD_GAP = " · "
# Whatever else is said, this much of a system prompt is shown.
_LEAST_SYSTEM_CELLS = 24


class HeadLine(Static):
    """The conversation's title, which server answers and how, and the system prompt; hidden when empty."""

    DEFAULT_CSS = """
    HeadLine { height: 1; padding: 0 2; color: $hint; text-wrap: nowrap; text-overflow: ellipsis; display: none; }
    HeadLine.-busy { color: $accent-text; }
    """

    def __init__(self) -> None:
        super().__init__("", id="head", markup=False)
        self._shown = ("", False)

    def show(self, parts: list[str], system: str, *, busy: bool, width: int, title: str = "") -> None:
        """Show these after the `title`, and the system prompt in what room is left of `width` cells; `busy`: something is waited for."""
        said = _HEAD_GAP.join(printable(part) for part in parts if part)
        prompt = "system: " + " ".join(printable(system).split()) if system else ""
        title = elide(one_line(title), max(16, width // 3))
        room = width - 4 - (cell_len(title) + len(_HEAD_GAP) if title else 0)
        room -= (len(prompt[:_LEAST_SYSTEM_CELLS]) + len(_HEAD_GAP)) if prompt else 0
        line = _HEAD_GAP.join(part for part in (elide(said, max(8, room)) if said else "", prompt) if part)
        shown = Text.assemble((title, "bold"), _HEAD_GAP if title and line else "", line)
        if (shown.plain, busy) != self._shown:
            self._shown = shown.plain, busy
            self.set_class(busy, "-busy")
            self.display = bool(shown.plain)
            self.update(shown)
