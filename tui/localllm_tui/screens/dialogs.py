"""Dialogs on top of the chat that a key closes: help, texts and tables, two answers, an approval;
and the panel of figures."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Static

from localllm_tui.bindings import HasKeys
from localllm_tui.control.chat import ChatController
from localllm_tui.control.commands import HelpSection, help_sections
from localllm_tui.control.comparison import compared
from localllm_tui.control.face import Allowed
from localllm_tui.control.keys import APPROVAL, HELP, KeyContext, hints
from localllm_tui.control.terminal import printable
from localllm_tui.widgets.figures import GlassPanel
from localllm_tui.widgets.line_filters import frame_title

T = TypeVar("T")


class Dialog(HasKeys, ModalScreen[T], Generic[T]):
    """A framed column of texts and tables that scrolls. Those derived from it bind the keys that
    end it."""

    DEFAULT_CSS = """
    Dialog { align: center middle; }
    Dialog > VerticalScroll {
        width: 96%; max-width: 110; height: auto; max-height: 90%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    Dialog Static { height: auto; }
    """
    KEYS: ClassVar[KeyContext] = "help"

    def __init__(self, title: str, *contents: RenderableType) -> None:
        super().__init__()
        self._title = title
        self._contents = contents

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._title)
            box.border_subtitle = hints(self.KEYS)
            for content in self._contents:
                yield Static(content, markup=False)

    def action_close(self) -> None:
        self.dismiss(None)


class TextDialog(Dialog[None], keys=HELP):
    DEFAULT_CSS = "TextDialog > VerticalScroll { max-width: 116; }"


class WideDialog(Dialog[None], keys=HELP):
    """A dialog that uses all of the screen."""

    DEFAULT_CSS = "WideDialog > VerticalScroll { max-width: 100%; }"


class HelpScreen(Dialog[None], keys=HELP):
    DEFAULT_CSS = """
    HelpScreen > VerticalScroll { height: 90%; }
    HelpScreen Static { margin-bottom: 1; }
    """


def _key_table(section: HelpSection) -> Table:
    title, entries = section
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, expand=True, title=title)
    table.title_justify = "left"
    table.title_style = "bold"
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=2, overflow="fold")
    for how, help_text in entries:
        table.add_row(how, help_text)
    return table


async def open_comparison(screen: Screen[Any], chat: ChatController, argument: str) -> None:
    """/compare: two versions of the last answer, next to each other."""
    (title, text), (shown_title, shown_text) = compared(chat.session, argument)
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    for heading in (title, shown_title):
        table.add_column(Text(heading), ratio=1, overflow="fold")
    table.add_row(Text(text), Text(shown_text))
    await screen.app.push_screen(WideDialog("two versions of the answer", table))


class Approval(Dialog[Allowed], keys=APPROVAL):
    """Dismisses with "" unless a key for a yes is pressed."""

    DEFAULT_CSS = """
    Approval { align: center bottom; }
    Approval > VerticalScroll { max-height: 70%; border: heavy $warning; border-title-color: $foreground; }
    """
    KEYS: ClassVar[KeyContext] = "approving"

    def __init__(self, about: str, *said: str) -> None:
        super().__init__(about, *(printable(text) for text in said))

    def action_yes(self) -> None:
        self.dismiss("once")

    def action_always(self) -> None:
        """Allow this tool until the tools are switched off."""

    def action_no(self) -> None:
        self.dismiss("")


class ToolApproval(Approval, keys=APPROVAL):
    KEYS: ClassVar[KeyContext] = "approving a tool"

    def action_always(self) -> None:
        self.dismiss("always")


async def approved(app: App[Any], about: str, *texts: str, tool: bool) -> Allowed:
    """Ask the user to approve the action in `texts`. Cancelling this coroutine (the answer is
    stopped) closes the dialog."""
    kind = ToolApproval if tool else Approval
    dialog = kind(about, *texts)
    answers = asyncio.Queue[Allowed | None]()
    await app.push_screen(dialog, answers.put_nowait)
    try:
        return await answers.get() or ""
    finally:
        if dialog.is_attached and app.screen is dialog:
            dialog.dismiss("")


async def open_help(screen: Screen[Any], _: ChatController, __: str) -> None:
    tables = [_key_table(section) for section in help_sections()]
    await screen.app.push_screen(HelpScreen("keys and commands", *tables))


async def open_glass(screen: Screen[Any], _: ChatController, __: str) -> None:
    """/glass: show or hide the panel."""
    screen.query_one(GlassPanel).toggle_class("wanted")
