"""A list to pick from by typing a part of what is meant: arrows move in it while the keys go to the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from localllm_tui.bindings import bindings_of
from localllm_tui.control.keys import FILES, KeyContext, hints
from localllm_tui.widgets.graphemes import WholeInput
from localllm_tui.widgets.line_filters import title

T = TypeVar("T")


class ListPicker(ModalScreen[T]):
    """Dismisses with what `_choose` makes of an option's id, or None."""

    DEFAULT_CSS = """
    ListPicker { align: center middle; }
    ListPicker > Vertical {
        width: 90%; max-width: 100; height: 70%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    ListPicker OptionList { height: 1fr; border: none; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(FILES)
    HINTS: ClassVar[KeyContext] = KeyContext.FILING

    def __init__(self, about: str, query: str = "", placeholder: str = "", waiting: str = "") -> None:
        super().__init__()
        self._about, self._query, self._placeholder, self._waiting = about, query, placeholder, waiting

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = title(self._about)
            box.border_subtitle = hints(self.HINTS)
            yield WholeInput(self._query, placeholder=self._placeholder, select_on_focus=False)
            yield OptionList()
            yield Static(self._waiting, id="found", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @property
    def options(self) -> OptionList:
        return self.query_one(OptionList)

    def found(self, said: str) -> None:
        """Say what was found under the list."""
        self.query_one("#found", Static).update(said)

    def _choose(self, name: str) -> None:
        raise NotImplementedError

    def _fill(self, query: str) -> None:
        raise NotImplementedError

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, _: Input.Submitted) -> None:
        if self.options.highlighted is not None:
            self._choose(str(self.options.get_option_at_index(self.options.highlighted).id))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(str(event.option.id))

    def on_key(self, event: events.Key) -> None:
        options = self.options
        moves: dict[str, Callable[[], None]] = {
            "up": options.action_cursor_up, "down": options.action_cursor_down, "ctrl+r": options.action_cursor_down,
            "pageup": options.action_page_up, "pagedown": options.action_page_down,
        }  # fmt: skip
        if event.key in moves and not options.has_focus:
            event.stop()
            event.prevent_default()
            moves[event.key]()

    def action_close(self) -> None:
        self.dismiss(None)
