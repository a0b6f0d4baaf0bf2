"""What opens on top of the chat and is closed by a key: help, text and tables, the glass panel, a tool's approval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.chat import ChatController
from localllm_tui.control.commands import HelpSection, help_sections
from localllm_tui.control.keys import APPROVAL, GLASS, HELP, KeyContext, hints
from localllm_tui.control.physics import PANEL_WIDTH, AnswerSpeed, ModelPhysics, panel_lines
from localllm_tui.control.terminal import printable
from localllm_tui.widgets.glass import LEAST_COLUMNS, GlassPanel, glass_text
from localllm_tui.widgets.line_filters import title as frame_title


class TextDialog(ModalScreen[None]):
    """Scrolls; any of its keys closes it."""

    DEFAULT_CSS = """
    TextDialog { align: center middle; }
    TextDialog > VerticalScroll {
        width: 96%; max-width: 116; height: auto; max-height: 90%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    TextDialog Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(HELP)

    def __init__(self, title: str, lines: Sequence[str] = (), rows: Sequence[Sequence[str]] = ()) -> None:
        super().__init__()
        self._title, self._lines, self._rows = title, lines, rows

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._title)
            box.border_subtitle = hints(KeyContext.HELP)
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


class HelpScreen(ModalScreen[None]):
    """Scrolls with the arrow keys; any of its keys closes it."""

    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > VerticalScroll {
        width: 96%; max-width: 110; height: 90%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    HelpScreen Static { height: auto; margin-bottom: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(HELP)

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = "keys and commands"
            box.border_subtitle = hints(KeyContext.HELP)
            for section in help_sections():
                yield Static(_key_table(section), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_close(self) -> None:
        self.dismiss(None)


def _key_table(section: HelpSection) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, expand=True, title=section.title)
    table.title_justify, table.title_style = "left", "bold"
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for entry in section.entries:
        table.add_row(entry.how, entry.what)
    return table


_LOOK_S = 0.25


class GlassScreen(ModalScreen[None]):
    """Asks `read` for the figures again and again while it is open."""

    DEFAULT_CSS = f"""
    GlassScreen {{ align: center middle; }}
    GlassScreen > VerticalScroll {{
        width: {PANEL_WIDTH + 8}; max-width: 100%; height: auto; max-height: 100%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 2; background: $surface;
    }}
    GlassScreen Static {{ text-wrap: nowrap; }}
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(GLASS)

    def __init__(self, read: Callable[[], tuple[ModelPhysics | None, AnswerSpeed | None, str]]) -> None:
        super().__init__()
        self._read = read

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_subtitle = hints(KeyContext.HELP)
            yield Static("", markup=False)

    def on_mount(self) -> None:
        self._draw()
        self.set_interval(_LOOK_S, self._draw)

    def action_close(self) -> None:
        self.dismiss(None)

    def _draw(self) -> None:
        physics, speed, loading = self._read()
        width = self.query_one(Static).size.width or PANEL_WIDTH
        lines = panel_lines(physics, speed, min(PANEL_WIDTH, width), loading=loading)
        self.query_one(Static).update(glass_text(lines))


class Approval(ModalScreen[bool]):
    """Dismisses with True for a yes alone."""

    DEFAULT_CSS = """
    Approval { align: center bottom; }
    Approval > VerticalScroll {
        width: 96%; max-width: 110; height: auto; max-height: 70%;
        border: heavy $warning; border-title-color: $foreground; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    Approval Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(APPROVAL)

    def __init__(self, about: str, *said: str) -> None:
        super().__init__()
        self._about, self._said = about, said

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._about)
            box.border_subtitle = hints(KeyContext.APPROVING)
            for said in self._said:
                yield Static(printable(said), markup=False)

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()

    def action_yes(self) -> None:
        self.dismiss(True)

    def action_no(self) -> None:
        self.dismiss(False)


async def open_help(screen: Screen[Any], _: ChatController, __: str) -> None:
    await screen.app.push_screen(HelpScreen())


async def open_glass(screen: Screen[Any], chat: ChatController, _: str) -> None:
    """/glass: show or hide the panel; on a screen of its own where there is no room beside the conversation."""
    if screen.size.width < LEAST_COLUMNS:
        await screen.app.push_screen(GlassScreen(lambda: (chat.physics, chat.speed, chat.loading_words)))
    else:
        screen.query_one(GlassPanel).toggle()
