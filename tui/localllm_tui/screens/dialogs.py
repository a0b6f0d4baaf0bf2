"""Dialogs on top of the chat that a key closes: help, texts and tables, two answers, an approval;
and the panel of figures."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar, Generic, TypeVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static

from localllm_tui.bindings import HasKeys
from localllm_tui.control.chat import ChatController
from localllm_tui.control.commands import HelpSection, help_sections
from localllm_tui.control.comparison import compared
from localllm_tui.control.face import Allowed
from localllm_tui.control.formatting import fitted
from localllm_tui.control.keys import APPROVAL, HELP, KeyContext, hints
from localllm_tui.control.terminal import printable
from localllm_tui.widgets.figures import GlassPanel
from localllm_tui.widgets.line_filters import frame_title
from localllm_tui.widgets.rows import wrapped
from localllm_tui.widgets.text import GrowingText

T = TypeVar("T")
# An approval has at least so many rows.
_APPROVAL_ROWS = 8
# The help has two columns from this width.
_TWO_COLUMNS = 56


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

    def __init__(self, title: str, *contents: str | Widget) -> None:
        super().__init__()
        self._title = title
        self._contents = contents

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._title)
            box.border_subtitle = fitted(hints(self.KEYS), self.app.size.width * 24 // 25 - 4)
            for content in self._contents:
                yield GrowingText(content, plain=True) if isinstance(content, str) else content

    def action_close(self) -> None:
        self.dismiss(None)


class TextDialog(Dialog[None], keys=HELP):
    DEFAULT_CSS = "TextDialog > VerticalScroll { max-width: 116; }"


class WideDialog(Dialog[None], keys=HELP):
    """A dialog that uses all of the screen."""

    DEFAULT_CSS = """
    WideDialog > VerticalScroll { max-width: 100%; }
    WideDialog Horizontal, WideDialog Vertical { height: auto; }
    WideDialog Vertical { padding-right: 2; }
    """


class HelpScreen(Dialog[None], keys=HELP):
    DEFAULT_CSS = """
    HelpScreen > VerticalScroll { height: 90%; }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = frame_title(self._title)
            box.border_subtitle = hints(self.KEYS)
            for section in help_sections():
                yield KeyList(section)


class KeyList(Static):
    """Keys or commands and their effects, below a title: in two columns if there is room."""

    def __init__(self, section: HelpSection) -> None:
        super().__init__("", markup=False)
        self._section = section

    def on_resize(self, event: events.Resize) -> None:
        self.update(_key_lines(self._section, event.size.width))


def _key_lines(section: HelpSection, width: int) -> Text:
    title, entries = section
    indent = width // 3
    in_columns = width >= _TWO_COLUMNS
    if not in_columns:
        indent = 2
    lines = [Text(title, "bold" if in_columns else "bold underline")]
    for how, help_text in entries:
        rows = [row.text for row in wrapped(Text(help_text), max(1, width - indent))]
        if in_columns and len(how) < indent:
            lines.append(Text(how.ljust(indent)) + rows.pop(0))
        else:
            lines.append(Text(how, "" if in_columns else "bold"))
        lines += [Text(" " * indent) + row for row in rows]
    return Text("\n").join([*lines, Text("")])


async def open_comparison(screen: Screen[Any], chat: ChatController, argument: str) -> None:
    """/compare: two versions of the last answer, next to each other."""
    columns = []
    for title, text in compared(chat.session, argument):
        columns.append(Vertical(Static(title, markup=False), GrowingText(text, plain=True)))
    await screen.app.push_screen(WideDialog("two versions of the answer", Horizontal(*columns)))


class Approval(Dialog[Allowed], keys=APPROVAL):
    """Dismisses with "" unless a key for a yes is pressed."""

    DEFAULT_CSS = """
    Approval { align: center bottom; }
    Approval > VerticalScroll { max-height: 100%; border: heavy $accent-text; border-title-color: $foreground; }
    """
    KEYS: ClassVar[KeyContext] = "approving"

    def __init__(self, about: str, *said: str) -> None:
        super().__init__(about, *(printable(text) for text in said))

    def on_resize(self) -> None:
        """Stay above the message box, so that both frames are whole."""
        boxes = self.app.screen_stack[0].query("#composer, #slash")
        tops = [box.region.y for box in boxes if box.region.height]
        below = self.size.height - min(tops, default=self.size.height)
        if self.size.height - below < _APPROVAL_ROWS:
            below = 0
        self.query_one(VerticalScroll).styles.margin = (0, 0, below, 0)

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
    await screen.app.push_screen(HelpScreen("keys and commands"))


async def open_glass(screen: Screen[Any], _: ChatController, __: str) -> None:
    """/glass: show or hide the panel."""
    screen.query_one(GlassPanel).toggle_class("wanted")
