"""What a chat asks of whatever shows it: the screen, the lines, the page above a terminal's
input."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.answering import AnswerDisplay, PendingAnswer


class Face(Protocol):
    """How a chat looks: what it calls to show itself and to ask. What a face need not do ends here
    with a return.

    `full_screen`: figures of the model are shown, and what is typed stays in the input until its
    question is stored.
    """

    full_screen: bool

    async def show_note(self, text: str, *, markdown: bool = False) -> None:
        """Show what is no part of the conversation."""

    async def trouble(self, error: LocalLLMError, next_steps: str = "") -> None:
        """Show an error; `next_steps`: what the user can do now."""

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: Literal["information", "warning", "error"] = "information",
        timeout: float | None = None,
        markup: bool = False,
    ) -> None:
        """Show a short message that is no part of the conversation."""

    def changed(self, *, recount: bool = False) -> None:
        """Something about the chat is different; `recount`: what was counted of the conversation no
        longer holds."""
        return

    async def show_session(self, at: int, before: str | None) -> None:
        """Show the chat's session in place of the conversation `before`, at the turn of this id (0:
        its end)."""

    async def redraw(self) -> None:
        """Show the branch that the session shows now."""

    async def show_asked(self, turn: StoredMessage, *, edited: bool) -> None:
        """Show a new question; `edited`: the turn is another version of an earlier one."""
        return

    async def show_answer(self, keep: PendingAnswer, *, again: bool) -> AnswerDisplay:
        """Make what shows an answer as it comes; `again`: in place of what follows its question."""

    async def end_answer(
        self, shown: AnswerDisplay, stream: PendingAnswer, error: LocalLLMError | None
    ) -> None:
        """Show how an answer ended."""

    def show_place(self, shown: AnswerDisplay, turn: StoredMessage) -> None:
        """Show which version of its turn an answer is, once it is stored."""
        return

    def submit_queued(self, text: str) -> None:
        """Submit a question that waited for the answer, if it is still what is typed."""
        return

    async def approve(self, about: str, *said: str) -> bool:
        """Ask the user whether what is `said` may be done; `about` names it."""

    def edit(self, turn: StoredMessage) -> None:
        """Let the user change the text of `turn`."""

    def copy(self, text: str, what: str) -> None:
        """Put `text` on the clipboard, and show a message about it."""

    def run_beside(self, what: Callable[[], Coroutine[Any, Any, None]], group: str) -> None:
        """Run `what` in parallel with the conversation, replacing earlier work of the same `group`.

        Only a face with a full screen needs to implement this.
        """
        return

    async def run_on_screen(self, name: str, argument: str) -> bool:
        """Run a command with the face's own implementation. Returns False if it has no
        implementation."""

    async def close(self) -> None:
        """End the face: the chat is left."""
        return
