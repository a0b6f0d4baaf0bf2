"""Lists from which the user picks by typing a part of a row: files below a folder, earlier
questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.cells import cell_len
from rich.text import Text as RichText
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm.conversation.history import History
from localllm_tui.bindings import HasKeys
from localllm_tui.control import commands
from localllm_tui.control.attachments import files_and_folders, names_like
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide, fitted, how_many
from localllm_tui.control.keys import FILES, KeyContext, hints
from localllm_tui.control.meter import file_cost
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.beside import start
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
    key_context: KeyContext = "filing"

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
            yield SearchInput(self._typed, placeholder=self._placeholder, select_on_focus=False)
            yield self.options
            yield Static("", id="preview", markup=False)
            yield Static(self._waiting, id="found", markup=False)

    @property
    def width(self) -> int:
        """Cells of a line in the frame."""
        return max(20, min(100, self.app.size.width * 9 // 10) - 8)

    def on_mount(self) -> None:
        self.fill(self._typed)

    def found(self, said: str) -> None:
        """Show the number of rows, or another text, under the list."""
        self.query_one("#found", Static).update(said)

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


SHOWN = 50


class FilePicker(Picker[str]):
    """Dismisses with the name below `folder` of the file or folder that was chosen, or None."""

    def __init__(self, chat: ChatController, folder: Path) -> None:
        super().__init__(
            f"a file below {folder.name or folder}",
            placeholder="part of its name",
            waiting="reading the folder…",
        )
        self._chat = chat
        self._folder = folder
        self._names: list[str] | None = None
        self._costs: dict[str, tuple[str, bool]] = {}  # file_cost of each

    def on_mount(self) -> None:
        super().on_mount()
        start(self, self._read, "read")

    async def _read(self) -> None:
        self._names = await asyncio.to_thread(files_and_folders, self._folder)
        self.fill(self.query_one(Input).value)

    def choose(self, value: str) -> None:
        cost, goes = self._costs.get(value, ("", True))
        if goes:
            self.dismiss(value)
        else:
            self.found(f"{one_line(value)} can't go along: {cost}")

    def fill(self, query: str) -> None:
        if self._names is None:
            return
        names = names_like(query.strip(), self._names)
        said = how_many(len(names), "file") if names else "no such file"
        self.show([(self._line(name), name) for name in names[:SHOWN]], said)
        self._count_shown()

    def on_option_list_option_highlighted(self) -> None:
        self._count_shown()

    def _count_shown(self) -> None:
        """Count what is on the screen, and no more: counting reads the file."""
        options = self.options
        rows = max(1, options.size.height)
        at = options.highlighted or 0
        first = max(0, min(options.scroll_offset.y, at))
        names = self.values[first : max(first + rows, at + 1)]
        if any(name not in self._costs for name in names):
            start(self, partial(self._count, names), "count")

    async def _count(self, names: list[str]) -> None:
        for name in [name for name in names if name not in self._costs]:
            self._costs[name] = await file_cost(
                self._chat.client, self._chat.model, self._folder / name, self._chat.listed.n_ctx
            )
            if name in self.values:
                at = self.values.index(name)
                self.options.replace_option_prompt_at_index(at, self._line(name))

    def _line(self, name: str) -> RichText:
        cost, _ = self._costs.get(name, ("", True))
        room = self.width - len(cost)
        shown = elide(one_line(name), room - 2)
        return RichText(shown + " " * max(2, room - cell_len(shown)) + cost)


LISTED = 200


class AskedPicker(Picker[str]):
    """Dismisses with a question as it was typed, or None."""

    key_context = "asked"

    def __init__(self, history: History, query: str) -> None:
        super().__init__("asked before", query, "words of it")
        self._history = history

    def fill(self, query: str) -> None:
        rows = []
        for question in self._history.asked(query, limit=LISTED):
            rows.append((RichText(elide(one_line(question), self.width)), question))
        self.show(rows, how_many(len(rows), "question") if rows else "nothing like it was asked")


async def open_asked(screen: Screen[Any], chat: ChatController, words: str) -> None:
    """/asked: search earlier questions; the chosen one takes the place of what is typed."""

    composer = screen.query_one(Composer)

    def chosen(question: str | None) -> None:
        if question is not None:
            composer.replace_text(question)

    await screen.app.push_screen(AskedPicker(chat.history, words or composer.text.strip()), chosen)


async def open_files(screen: Screen[Any], chat: ChatController) -> None:
    """@: choose a file or a folder below this one, which is attached."""

    def chosen(name: str | None) -> None:
        if name is not None:
            screen.query_one(Composer).insert(f"{Path(name).name} ")  # after the @
            screen.call_later(commands.run_and_report, chat, "attach", str(Path.cwd() / name))

    await screen.app.push_screen(FilePicker(chat, Path.cwd()), chosen)
