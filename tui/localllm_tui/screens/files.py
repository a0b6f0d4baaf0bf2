"""The list of files that "@" opens: type to find one, see what it costs, Enter sends it along."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len
from rich.text import Text as RichText
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.fuzzy import Matcher
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from localllm_tui.bindings import bindings_of
from localllm_tui.control.attachments import files_below
from localllm_tui.control.client import ChatClient
from localllm_tui.control.formatting import elide
from localllm_tui.control.keys import FILES, KeyContext, hints
from localllm_tui.control.meter import FileCost
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.background import start
from localllm_tui.widgets.line_filters import title

SHOWN = 50
# Scoring is slow; the shorter name is most often meant.
SCORED = 1_000


class FilePicker(ModalScreen[Path | None]):
    """Dismisses with the file below `folder` that was chosen, or None."""

    DEFAULT_CSS = """
    FilePicker { align: center middle; }
    FilePicker > Vertical {
        width: 90%; max-width: 100; height: 70%;
        border: round $accent; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1; background: $surface;
    }
    FilePicker OptionList { height: 1fr; border: none; background: transparent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(FILES)

    def __init__(self, client: ChatClient, model: str, n_ctx: int | None, folder: Path) -> None:
        super().__init__()
        self._client, self._model, self._n_ctx = client, model, n_ctx
        self._folder = folder
        self._names: list[str] = []
        self._costs: dict[str, FileCost] = {}

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = title(f"a file below {self._folder}")
            box.border_subtitle = hints(KeyContext.FILING)
            yield Input(placeholder="part of its name")
            yield OptionList()
            yield Static("reading the folder…", id="found", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        start(self, self._read, "read")

    async def _read(self) -> None:
        self._names = await asyncio.to_thread(files_below, self._folder)
        self._fill(self.query_one(Input).value)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, _: Input.Submitted) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            self._choose(str(options.get_option_at_index(options.highlighted).id))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._choose(str(event.option.id))

    def on_key(self, event: events.Key) -> None:
        # Focus stays in the search; the arrows move in the list all the same.
        options = self.query_one(OptionList)
        move = {"up": options.action_cursor_up, "down": options.action_cursor_down}.get(event.key)
        if move is not None and not options.has_focus:
            event.stop()
            event.prevent_default()
            move()

    def action_close(self) -> None:
        self.dismiss(None)

    def _choose(self, name: str) -> None:
        refused = self._costs.get(name, FileCost()).refused
        if refused:
            self.query_one("#found", Static).update(f"{one_line(name)} can't go along: {refused}")
        else:
            self.dismiss(self._folder / name)

    def _fill(self, query: str) -> None:
        names = self._found(query.strip())
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(self._line(name), id=name) for name in names[:SHOWN]])
        if names:
            options.highlighted = 0
        said = f"{len(names):,} file{'' if len(names) == 1 else 's'}" if names else "no such file"
        self.query_one("#found", Static).update(said)
        self._count_shown()

    def _found(self, query: str) -> list[str]:
        if not query:
            return self._names
        matcher = Matcher(query)
        possible = sorted((name for name in self._names if _has_letters(name, query)), key=len)[:SCORED]
        scored = [(matcher.match(name), name) for name in possible]
        return [name for score, name in sorted(scored, key=lambda s: (-s[0], len(s[1]))) if score > 0]

    def on_option_list_option_highlighted(self) -> None:
        self._count_shown()

    def _count_shown(self) -> None:
        """Count what is on the screen, and no more: counting reads the file."""
        options = self.query_one(OptionList)
        rows, at = max(1, options.size.height), options.highlighted or 0
        first = max(0, min(options.scroll_offset.y, at))
        shown = range(min(first, options.option_count), min(max(first + rows, at + 1), options.option_count))
        names = [str(options.get_option_at_index(n).id) for n in shown]
        if any(name not in self._costs for name in names):
            start(self, partial(self._count, names), "count")

    async def _count(self, names: list[str]) -> None:
        for name in names:
            if name not in self._costs:
                path = self._folder / name
                self._costs[name] = await FileCost.of(self._client, self._model, path, self._n_ctx)
                options = self.query_one(OptionList)
                options.replace_option_prompt(name, self._line(name))

    def _line(self, name: str) -> RichText:
        width = max(30, min(100, self.app.size.width * 9 // 10) - 8)
        cost = self._costs.get(name, FileCost()).words
        shown = elide(one_line(name), width - len(cost) - 2)
        return RichText(shown + " " * max(2, width - len(cost) - cell_len(shown)) + cost)


def _has_letters(name: str, query: str) -> bool:
    """Whether all letters of `query` come in `name`, in their order."""
    letters = iter(name.lower())
    return all(letter in letters for letter in query.lower() if letter != " ")
