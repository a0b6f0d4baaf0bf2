"""What F1 and /help put on top of the chat: every key and command, from the registry."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.commands import Section, sections
from localllm_tui.control.keys import HELP, Moment, hints


class HelpScreen(ModalScreen[None]):
    """Scrolls with the arrow keys; any of its keys closes it."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 96%; max-width: 110; height: 90%;
        border: round $accent; padding: 0 1; background: $surface;
    }
    HelpScreen Static { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(HELP)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "keys and commands"
            box.border_subtitle = hints(Moment.HELP)
            for section in sections():
                yield Static(_table(section), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_close(self) -> None:
        self.dismiss(None)


def _table(section: Section) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, expand=True, title=section.title)
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for entry in section.entries:
        table.add_row(entry.how, entry.what)
    return table
