"""Two versions of an answer side by side."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen, Screen

from localllm.conversation.history import StoredMessage
from localllm.errors import UsageError
from localllm_tui.bindings import bindings_of
from localllm_tui.control.chat import ChatController
from localllm_tui.control.keys import COMPARE, KeyContext, hints
from localllm_tui.control.session import Session
from localllm_tui.control.terminal import one_line, printable
from localllm_tui.widgets.line_filters import title
from localllm_tui.widgets.text import GrowingText


class CompareScreen(ModalScreen[None]):
    """`versions` of one turn, the one at `at` on the left; the arrows change what is on the right."""

    DEFAULT_CSS = """
    CompareScreen { align: center middle; }
    CompareScreen > Horizontal { width: 98%; height: 94%; background: $surface; }
    CompareScreen VerticalScroll {
        width: 1fr; border: round $accent-text; border-title-color: $accent-text; border-subtitle-color: $hint; padding: 0 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = bindings_of(COMPARE)

    def __init__(self, versions: list[StoredMessage], at: int) -> None:
        super().__init__()
        self._versions, self._left, self._right = versions, at, (at - 1) % len(versions)

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield VerticalScroll(id="left")
            yield VerticalScroll(id="right")

    async def on_mount(self) -> None:
        await self._show("#left", self._left)
        await self.action_other(0)
        self.query_one("#right").border_subtitle = hints(KeyContext.COMPARING)
        self.query_one("#left").focus()

    async def _show(self, where: str, n: int) -> None:
        turn, column = self._versions[n], self.query_one(where, VerticalScroll)
        tokens = turn.meta.get("completion_tokens")
        said = f"{one_line(str(turn.meta.get('model') or ''))} · {n + 1} of {len(self._versions)}"
        column.border_title = title(said + (f" · {tokens:,} tokens" if isinstance(tokens, int) else ""))
        await column.remove_children()
        await column.mount(GrowingText(printable(turn.content)))

    async def action_other(self, step: int) -> None:
        """Show the next version on the right, never that on the left."""
        n = len(self._versions)
        self._right = (self._right + step) % n
        if self._right == self._left:
            self._right = (self._right + (step or 1)) % n
        await self._show("#right", self._right)

    def action_close(self) -> None:
        self.dismiss(None)


def versions_of_answer(session: Session) -> tuple[list[StoredMessage], int]:
    """All versions of the last answer, and which is shown. Raises UsageError where there is one alone."""
    answer = session.last_answer
    versions = session.tree.versions(answer) if answer is not None else []
    if answer is None or len(versions) < 2:
        raise UsageError(
            "there is nothing to compare yet", hint="/retry MODEL answers the last question with another model"
        )
    return versions, next(n for n, version in enumerate(versions) if version.id == answer.id)


async def open_compare(screen: Screen[Any], chat: ChatController, _: str) -> None:
    """/compare: the versions of the last answer, two at a time."""
    await screen.app.push_screen(CompareScreen(*versions_of_answer(chat.session)))
