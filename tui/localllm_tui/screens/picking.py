"""Lists from which the user picks by typing a part of a row, such as earlier questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from rich.text import Text as RichText
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.conversation.history import History
from localllm_tui.bindings import HasKeys
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide, fitted, how_many
from localllm_tui.control.keys import FILES, KeyContext, hints
from localllm_tui.control.terminal import one_line
from localllm_tui.widgets.composer import Composer
from localllm_tui.widgets.inputs import SearchInput
from localllm_tui.widgets.line_filters import frame_title

T = TypeVar("T")


class Picker(HasKeys, ModalScreen[T | None], Generic[T], keys=FILES):
    """A search, what it finds in `options`, and a line of words under it. Dismisses with what is
    picked, or None."""

    DEFAULT_CSS = """
    Picker { align: center middle; }
    Picker > Vertical {
        width: 90%; max-width: 100; height: 70%;
        border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    Picker OptionList { height: 1fr; border: none; background: transparent; }
    Picker #preview { display: none; }
    """
    key_context: KeyContext = "asked"

    def __init__(
        self,
        about: str,
        query: str = "",
        placeholder: str = "",
        waiting: str = "",
    ) -> None:
        super().__init__()
        self._about = about
        self._placeholder = placeholder
        self._waiting = waiting
        self._typed = query
        self.options = OptionList()
        self.values: list[T] = []  # the value of each row

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = frame_title(self._about)
            box.border_subtitle = fitted(hints(self.key_context), self.width)
            yield self.search_input()
            yield self.options
            yield Static("", id="preview", markup=False)
            yield Static(self._waiting, id="found", markup=False)

    def search_input(self) -> SearchInput:
        return SearchInput(self._typed, placeholder=self._placeholder, select_on_focus=False)

    @property
    def width(self) -> int:
        """Cells of a line in the frame."""
        return max(20, min(100, self.app.size.width * 9 // 10) - 8)

    def on_mount(self) -> None:
        self.fill(self._typed)

    def found(self, status: str) -> None:
        """Show the number of rows, or another text, under the list."""
        self.query_one("#found", Static).update(status)

    def fill(self, query: str) -> None:
        """List the rows that this query finds."""
        raise NotImplementedError

    def show(self, rows: Sequence[tuple[RichText, T]], summary: str) -> None:
        """List these lines, each with its value, and the `summary` of the result."""
        self.values = [value for _, value in rows]
        self.options.set_options(Option(line) for line, _ in rows)
        self.options.highlighted = 0 if rows else None
        self.found(summary)

    @property
    def highlighted(self) -> T | None:
        at = self.options.highlighted
        return self.values[at] if at is not None else None

    def choose(self, value: T) -> None:
        self.dismiss(value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.choose(self.values[event.option_index])

    def on_input_changed(self, event: Input.Changed) -> None:
        self.fill(event.value)

    def on_input_submitted(self, _: Input.Submitted) -> None:
        chosen = self.highlighted
        if chosen is not None:
            self.choose(chosen)

    def action_close(self) -> None:
        self.dismiss(None)


LISTED = 200
_LINE_CHARS = 2_000


class QuestionPicker(Picker[str]):
    """A list of earlier questions. The result is the chosen question, or None."""

    def __init__(self, history: History, query: str) -> None:
        super().__init__("asked before", query, "words of the question")
        self._history = history

    def fill(self, query: str) -> None:
        rows = []
        for question in self._history.typed_questions(query, limit=LISTED):
            line = elide(one_line(question[:_LINE_CHARS]), self.width)
            rows.append((RichText(line), question))
        self.show(rows, how_many(len(rows), "question") if rows else "no matching question")


async def open_questions(screen: Screen[Any], chat: ChatController, words: str) -> None:
    """/asked: search earlier questions. The chosen one replaces the typed text."""

    composer = screen.query_one(Composer)

    def chosen(question: str | None) -> None:
        if question is not None:
            composer.replace_text(question)

    await screen.app.push_screen(
        QuestionPicker(chat.history, words or composer.text.strip()), chosen
    )
