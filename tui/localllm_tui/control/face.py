"""The interface of the chat's user interfaces: the full screen, the line chat and the inline
chat."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal, Protocol, TypeAlias

from localllm.conversation.history import StoredMessage
from localllm.errors import LocalLLMError
from localllm_tui.control.answering import AnswerDisplay, PendingAnswer

# The answer to an approval; "" rejects the action.
Allowed: TypeAlias = Literal["", "once", "always"]


class Face(Protocol):
    """How a chat looks: what it calls to show itself and to ask. What a face need not do ends here
    with a return.

    `full_screen`: figures of the model are shown, and what is typed stays in the input until its
    question is stored.
    """

    full_screen: bool

    async def show_note(self, text: str, *, markdown: bool = False) -> None:
        """Show what is no part of the conversation."""

    async def show_error(self, error: LocalLLMError, next_steps: str = "") -> None:
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
        """Redraw after a change of the chat. With `recount`, the token count of the conversation is no
        longer holds."""
        return

    async def show_session(self, at: int, before: str | None) -> None:
        """Show the chat's session in place of the conversation `before`, at the turn of this id (0:
        its end)."""

    async def redraw(self) -> None:
        """Show the branch that the session shows now."""

    async def show_question(self, turn: StoredMessage, *, edited: bool) -> None:
        """Show a new question; `edited`: the turn is another version of an earlier one."""
        return

    async def show_answer(self, keep: PendingAnswer, *, again: bool) -> AnswerDisplay:
        """Create the view of a streaming answer. With `again`, it replaces the turns after its
        question."""

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

    async def approve(self, about: str, *said: str, tool: bool = False) -> Allowed:
        """Ask the user to approve the action described by `said`; `about` is its title.

        `tool`: the user may allow all later calls of this tool ("always").
        """

    def edit(self, turn: StoredMessage) -> None:
        """Let the user change the text of `turn`."""

    async def write(self, text: str) -> None:
        """Put `text` into the input."""

    def copy(self, text: str, label: str) -> None:
        """Put `text` on the clipboard, and show a message about it."""

    def run_in_background(self, label: Callable[[], Coroutine[Any, Any, None]], group: str) -> None:
        """Run `label` in parallel with the conversation, replacing earlier work of the same
        `group`.

        Only a face with a full screen needs to implement this.
        """
        return

    async def run_on_screen(self, name: str, argument: str) -> bool:
        """Run a command with the face's own implementation. Returns False if it has no
        implementation."""

    async def close(self) -> None:
        """End the face: the chat is left."""
        return
