"""The list of files that "@" opens: type to find one, see what it costs, Enter sends it along."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from rich.cells import cell_len
from rich.text import Text as RichText
from textual.fuzzy import Matcher
from textual.widgets import Input
from textual.widgets.option_list import Option

from localllm_tui.control.attachments import files_and_folders
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide
from localllm_tui.control.meter import FileCost
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.background import start
from localllm_tui.screens.picking import ListPicker

SHOWN = 50
# Scoring is slow; the shorter name is most often meant.
SCORED = 1_000


class FilePicker(ListPicker[Path | None]):
    """Dismisses with the file below `folder` that was chosen, or None."""

    def __init__(self, chat: ChatController, folder: Path) -> None:
        super().__init__(f"a file below {folder}", placeholder="part of its name", waiting="reading the folder…")
        self._chat, self._folder = chat, folder
        self._names: list[str] = []
        self._costs: dict[str, FileCost] = {}

    def on_mount(self) -> None:
        super().on_mount()
        start(self, self._read, "read")

    async def _read(self) -> None:
        self._names = await asyncio.to_thread(files_and_folders, self._folder)
        self.fill(self.query_one(Input).value)

    def choose(self, name: str) -> None:
        refused = self._costs.get(name, FileCost()).refused
        if refused:
            self.found(f"{one_line(name)} can't go along: {refused}")
        else:
            self.dismiss(self._folder / name)

    def fill(self, query: str) -> None:
        names = self._found(query.strip())
        self.options.set_options([Option(self._line(name), id=name) for name in names[:SHOWN]])
        if names:
            self.options.highlighted = 0
        self.found(f"{len(names):,} file{'' if len(names) == 1 else 's'}" if names else "no such file")
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
        options = self.options
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
                self._costs[name] = await FileCost.of(self._chat.client, self._chat.model, path, self._chat.n_ctx)
                self.options.replace_option_prompt(name, self._line(name))

    def _line(self, name: str) -> RichText:
        width = max(30, min(100, self.app.size.width * 9 // 10) - 8)
        cost = self._costs.get(name, FileCost()).words
        shown = elide(one_line(name), width - len(cost) - 2)
        return RichText(shown + " " * max(2, width - len(cost) - cell_len(shown)) + cost)


def _has_letters(name: str, query: str) -> bool:
    """Whether all letters of `query` come in `name`, in their order."""
    letters = iter(name.lower())
    return all(letter in letters for letter in query.lower() if letter != " ")
