"""The list of earlier conversations: type to search titles and texts, Enter opens one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text as RichText
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.conversation.history import ConversationSummary, History
from localllm_tui.bindings import bindings_of
from localllm_tui.control.keys import PICKER, Moment, hints
from localllm_tui.control.meter import ago, elide
from localllm_tui.control.terminal import printable


class Picker(ModalScreen[str | None]):
    """Dismisses with the chosen conversation's id, or None."""

    DEFAULT_CSS = """
    Picker { align: center middle; }
    Picker > Vertical {
        width: 90%; max-width: 110; height: 80%;
        border: round $accent; padding: 0 1; background: $surface;
    }
    Picker OptionList { height: 1fr; border: none; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(PICKER)

    def __init__(self, history: History, query: str = "") -> None:
        super().__init__()
        self.history = history
        self.query_text = query
        self._removing: str | None = None

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "conversations"
            box.border_subtitle = hints(Moment.CHOOSING)
            yield Input(self.query_text, placeholder="search titles and texts")
            yield OptionList()
            yield Static("", id="found", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._fill(self.query_text)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self._choose()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)

    def on_key(self, event: events.Key) -> None:
        # Focus stays in the search; the arrows move in the list all the same.
        options = self.query_one(OptionList)
        moves: dict[str, Callable[[], None]] = {
            "up": options.action_cursor_up,
            "down": options.action_cursor_down,
            "pageup": options.action_page_up,
            "pagedown": options.action_page_down,
        }
        if event.key in moves and not options.has_focus:
            event.stop()
            event.prevent_default()
            moves[event.key]()

    def action_close(self) -> None:
        self.dismiss(None)

    def action_remove(self) -> None:
        """Remove the highlighted conversation; asks by wanting the key twice."""
        chosen = self._highlighted()
        if chosen is None:
            return
        if self._removing != chosen:
            self._removing = chosen
            self.query_one("#found", Static).update("press Ctrl+X again to remove it for good")
            return
        self.history.delete(chosen)
        self._fill(self.query_one(Input).value)

    def _fill(self, query: str) -> None:
        self._removing = None
        found = self.history.list(query.strip() or None, limit=200)
        options = self.query_one(OptionList)
        options.clear_options()
        width = max(30, min(110, self.app.size.width * 9 // 10) - 8)
        for summary in found:
            options.add_option(Option(_line(summary, width), id=summary.id))
        if found:
            options.highlighted = 0
        count = f"{len(found)} conversation{'' if len(found) == 1 else 's'}"
        self.query_one("#found", Static).update(
            count if found else "nothing found" if query else "no conversations yet"
        )

    def _highlighted(self) -> str | None:
        options = self.query_one(OptionList)
        at = options.highlighted
        return options.get_option_at_index(at).id if at is not None else None

    def _choose(self) -> None:
        chosen = self._highlighted()
        if chosen is not None:
            self.dismiss(chosen)


def _line(summary: ConversationSummary, width: int) -> RichText:
    facts = f"{ago(time.time() - summary.updated_s)} · {summary.n_messages} messages"
    title = elide(printable(summary.title).replace("\n", " "), width - len(facts) - 2)
    # A Text, because brackets in a plain string would be read as markup.
    return RichText(title + " " * max(2, width - len(facts) - cell_len(title)) + facts)
