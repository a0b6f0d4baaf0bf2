"""What the slash commands need of the chat that shows what they do."""

from __future__ import annotations

from typing import Protocol

from localllm.conversation.history import History, StoredMessage
from localllm_tui.control.client import ChatClient, ListedModel
from localllm_tui.control.session import Session


class Chat(Protocol):
    """A chat with a conversation on screen. Every method shows what it did."""

    @property
    def client(self) -> ChatClient:
        """The server."""
        ...

    @property
    def history(self) -> History:
        """The conversations on disk."""
        ...

    @property
    def model(self) -> str:
        """The model that answers."""
        ...

    @property
    def n_ctx(self) -> int | None:
        """Its context in tokens; None while not known."""
        ...

    @property
    def session(self) -> Session:
        """The conversation on screen."""
        ...

    @property
    def system_asked(self) -> str | None:
        """The system prompt that the chat was started with."""
        ...

    @property
    def answering(self) -> bool:
        """Whether an answer is on its way."""
        ...

    @property
    def answer_text(self) -> str:
        """What came of the answer that is on its way; "" when there is none."""
        ...

    @property
    def attached(self) -> list[tuple[str, str]]:
        """Files for the next question: name and text."""
        ...

    async def say(self, text: str, *, markdown: bool = False) -> None:
        """Say something that is no part of the conversation."""
        ...

    async def open(self, session: Session) -> None:
        """Show another conversation."""
        ...

    async def choose(self, words: str) -> None:
        """Let the person find a conversation, beginning with `words`, and open it."""
        ...

    async def stop_answer(self) -> None:
        """Stop the answer, if there is one, and wait until what came is on disk."""
        ...

    async def answer_again(self) -> None:
        """Ask for the last answer anew, in the place of the one on screen. Raises UsageError when nothing was asked."""
        ...

    async def replace_answer(self, turn: StoredMessage) -> None:
        """Show another version of the last answer."""
        ...

    def edit(self, question: StoredMessage) -> None:
        """Let the person change `question`."""
        ...

    def attach(self, name: str, text: str) -> None:
        """Keep a file for the next question."""
        ...

    def use_model(self, name: str, models: list[ListedModel]) -> None:
        """Let `name`, one of `models`, answer from here on."""
        ...

    def to_clipboard(self, text: str, what: str) -> None:
        """Put `text` on the clipboard, which is `what` in words."""
        ...

    async def leave(self) -> None:
        """End the chat."""
        ...
