"""What is picked by typing a part of it: arrows move in the list while the keys go to the search."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static, Tree

from localllm_tui.bindings import bindings_of
from localllm_tui.control.formatting import fitted
from localllm_tui.control.keys import FILES, KeyContext, hints
from localllm_tui.widgets.graphemes import WholeInput
from localllm_tui.widgets.line_filters import title

T = TypeVar("T")


class Picker(ModalScreen[T], Generic[T]):
    """A search, what it finds in `listed`, and a line of words under it. Dismisses with what is picked, or None."""

    DEFAULT_CSS = """
    Picker { align: center middle; }
    Picker > Vertical {
        width: 90%; max-width: 100; height: 70%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    Picker OptionList, Picker Tree { height: 1fr; border: none; background: transparent; }
    """
    key_context: KeyContext = KeyContext.FILING

    def __init__(
        self, about: str, listed: OptionList | Tree[T], query: str = "", placeholder: str = "", waiting: str = ""
    ) -> None:
        super().__init__()
        self._about, self._list, self._placeholder, self._waiting = about, listed, placeholder, waiting
        self.query_text = query

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = title(self._about)
            box.border_subtitle = fitted(hints(self.key_context), self.width)
            yield WholeInput(self.query_text, placeholder=self._placeholder, select_on_focus=False)
            yield self._list
            yield from self.below()
            yield Static(self._waiting, id="found", markup=False)

    def below(self) -> list[Widget]:
        """What stands between the list and what was found."""
        return []

    @property
    def width(self) -> int:
        """Cells of a line in the frame."""
        return max(20, min(100, self.app.size.width * 9 // 10) - 8)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def found(self, said: str) -> None:
        """Say what was found under the list."""
        self.query_one("#found", Static).update(said)

    def fill(self, query: str) -> None:
        """List what this finds."""
        raise NotImplementedError

    def pick(self) -> None:
        """Dismiss with what is highlighted."""
        raise NotImplementedError

    def on_input_changed(self, event: Input.Changed) -> None:
        self.fill(event.value)

    def on_input_submitted(self, _: Input.Submitted) -> None:
        self.pick()

    def moves(self) -> dict[str, Callable[[], object]]:
        """What keys do in the list while the search has the focus."""
        listed = self._list
        return {
            "up": listed.action_cursor_up, "down": listed.action_cursor_down,
            "pageup": listed.action_page_up, "pagedown": listed.action_page_down,
        }  # fmt: skip

    def on_key(self, event: events.Key) -> None:
        move = self.moves().get(event.key)
        if move is not None and not self._list.has_focus:
            event.stop()
            event.prevent_default()
            move()

    def action_close(self) -> None:
        self.dismiss(None)


class ListPicker(Picker[T], Generic[T]):
    """Picks one of a flat list of options: `choose` makes something of its id."""

    BINDINGS: ClassVar[list[BindingType]] = bindings_of(FILES)

    def __init__(self, about: str, query: str = "", placeholder: str = "", waiting: str = "") -> None:
        self.options = OptionList()
        super().__init__(about, self.options, query, placeholder, waiting)

    def choose(self, name: str) -> None:
        raise NotImplementedError

    def pick(self) -> None:
        if self.options.highlighted is not None:
            self.choose(str(self.options.get_option_at_index(self.options.highlighted).id))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.choose(str(event.option.id))

    def moves(self) -> dict[str, Callable[[], object]]:
        return {**super().moves(), "ctrl+r": self.options.action_cursor_down}
