"""Lines to read on top of a screen: the arithmetic of a plan, plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.keys import HELP, Moment, hints
from localllm_tui.control.terminal import printable
from localllm_tui.widgets.foreign import title as frame_title


class Reading(ModalScreen[None]):
    """Scrolls; any of its keys closes it."""

    DEFAULT_CSS = """
    Reading { align: center middle; }
    Reading > VerticalScroll {
        width: 96%; max-width: 116; height: auto; max-height: 90%;
        border: round $accent; padding: 0 1; background: $surface;
    }
    Reading Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(HELP)

    def __init__(self, title: str, lines: Sequence[str] = (), rows: Sequence[Sequence[str]] = ()) -> None:
        super().__init__()
        self._title, self._lines, self._rows = title, lines, rows

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._title)
            box.border_subtitle = hints(Moment.HELP)
            if self._rows:
                yield Static(_table(self._rows), markup=False)
            yield Static(printable("\n".join(self._lines)), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_close(self) -> None:
        self.dismiss(None)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for row in rows:
        table.add_row(*(Text(printable(cell), style="bold" if row is rows[0] else "") for cell in row))
    return table
