"""The list of files under the message while an @ begins a name there."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine

from rich.cells import cell_len
from rich.text import Text
from textual.widgets import OptionList
from textual.widgets.option_list import Option
from textual.worker import Worker

from localllm_tui.control.attachments import names_like
from localllm_tui.control.formatting import elide
from localllm_tui.control.terminal import one_line
from localllm_tui.messages import FilesListed

_SHOWN = 50
# A longer word is no name of a file.
LONGEST_NAME = 300
_AT = re.compile(r"(?:^|\s)@(\S*)$")


def letters_after_at(before: str) -> str | None:
    """The letters after an @ that begins the last word of `before`; None without one."""
    found = _AT.search(before[-LONGEST_NAME:])
    if found is None:
        return None
    return found[1]


class FileMenu(OptionList, can_focus=False):
    """The files whose names have the letters after an @; hidden if there are none. All keys belong
    to the input, which reads the highlighted name.

    `names` reads the folder, in a thread; `cost` returns the cost of a file in words, and whether it
    can be attached.
    """

    DEFAULT_CSS = """
    FileMenu {
        height: auto; max-height: 8; padding: 0 2; border: none; display: none;
        background: $surface; text-wrap: nowrap; text-overflow: ellipsis;
        &:focus { border: none; }
    }
    """

    def __init__(
        self, names: Callable[[], list[str]], cost: Callable[[str], Awaitable[tuple[str, bool]]]
    ) -> None:
        super().__init__(id="files")
        self._read_names = names
        self._cost_of = cost
        self._names: list[str] | None = None
        self._costs: dict[str, tuple[str, bool]] = {}
        self._letters: str | None = None
        self._closed_for: str | None = None  # the letters for which Esc closed the list
        self._listed: list[str] = []

    def offer(self, letters: str | None) -> str | None:
        """List the files with these letters (None: no name is typed); returns the highlighted one,
        None without a list."""
        if letters is None:
            self._names = None  # the folder is read again for the next @
            self._closed_for = None
        elif self._letters is None:
            self._costs.clear()
            self._start(self._read, "read")
        if letters != self._letters:
            self._letters = letters
            self._list()
        if self.highlighted is None or not self.display:
            return None
        return self._listed[self.highlighted]

    def close(self) -> bool:
        """Hide the list until the next @; False if it is hidden."""
        if not self.display:
            return False
        self._closed_for = self._letters
        self._list()
        return True

    def refusal(self, name: str) -> str:
        """The reason why a file can't be attached; "" if it can, or is not counted yet."""
        cost, can_be_attached = self._costs.get(name, ("", True))
        if can_be_attached:
            return ""
        return f"{one_line(name)} can't be attached: {cost}"

    def _start(self, work: Callable[[], Coroutine[None, None, None]], group: str) -> Worker[None]:
        return self.run_worker(work, group=group, exclusive=True, exit_on_error=False)

    async def _read(self) -> None:
        names = await asyncio.to_thread(self._read_names)
        if self._letters is not None:
            self._names = names
            self._list()

    def _list(self) -> None:
        letters = self._letters
        closed = letters is None or (
            self._closed_for is not None and letters.startswith(self._closed_for)
        )
        self._listed = []
        if not closed and self._names is not None and letters is not None:
            self._listed = names_like(letters, self._names)[:_SHOWN]
        self.display = bool(self._listed)
        self.set_options([Option(self._line(name)) for name in self._listed])
        self.highlighted = 0 if self._listed else None
        self.post_message(FilesListed())

    # -- costs -------------------------------------------------------------------------------------

    def on_option_list_option_highlighted(self) -> None:
        self._start(self._count_visible, "count")

    async def _count_visible(self) -> None:
        """Count only the visible files, because counting reads them."""
        at = self.highlighted or 0
        rows = max(8, self.size.height)
        first = max(0, min(self.scroll_offset.y, at))
        for name in self._listed[first : max(first + rows, at + 1)]:
            if name not in self._costs:
                self._costs[name] = await self._cost_of(name)
            if name in self._listed:
                at = self._listed.index(name)
                self.replace_option_prompt_at_index(at, self._line(name))

    def _line(self, name: str) -> Text:
        cost, _ = self._costs.get(name, ("", True))
        width = max(20, self.app.size.width - 8)
        name_width = width - len(cost)
        shown = elide(one_line(name), name_width - 2)
        gap = " " * max(2, name_width - cell_len(shown))
        return Text(shown + gap + cost, no_wrap=True)
