"""Ctrl+R: what was asked before, in any conversation; what is chosen comes into the input."""

from __future__ import annotations

from typing import Any

from rich.text import Text
from textual.screen import Screen
from textual.widgets.option_list import Option

from localllm.conversation.history import History
from localllm_tui.control.chat import ChatController
from localllm_tui.control.formatting import elide, how_many
from localllm_tui.control.keys import KeyContext
from localllm_tui.control.terminal import one_line
from localllm_tui.screens.picking import ListPicker
from localllm_tui.widgets.composer import Composer

_LISTED = 200


class AskedPicker(ListPicker[str | None]):
    """Dismisses with a question as it was typed, or None."""

    key_context = KeyContext.ASKED

    def __init__(self, history: History, query: str) -> None:
        super().__init__("asked before", query, "words of it")
        self._history = history
        self._questions: list[str] = []

    def on_mount(self) -> None:
        super().on_mount()
        self.fill(self.query_text)

    def fill(self, query: str) -> None:
        self._questions = [*self._history.asked(query, limit=_LISTED)]
        width = max(20, self.app.size.width * 9 // 10 - 6)
        lines = [Text(elide(one_line(question), width), no_wrap=True) for question in self._questions]
        self.options.set_options([Option(line, id=str(n)) for n, line in enumerate(lines)])
        self.options.highlighted = 0 if self._questions else None
        self.found(how_many(len(self._questions), "question") if self._questions else "nothing like it was asked")

    def choose(self, name: str) -> None:
        self.dismiss(self._questions[int(name)])


async def open_asked(screen: Screen[Any], chat: ChatController, words: str) -> None:
    """/asked: search earlier questions; the chosen one takes the place of what is typed."""

    composer = screen.query_one(Composer)

    def chosen(question: str | None) -> None:
        if question is not None:
            composer.replace_text(question)

    await screen.app.push_screen(AskedPicker(chat.history, words or composer.text.strip()), chosen)
