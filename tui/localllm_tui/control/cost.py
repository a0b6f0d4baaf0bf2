"""What the conversation and what is typed after it cost in tokens, asked of the server: only it can count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.conversation.history import StoredMessage
from localllm.errors import ContextLengthError
from localllm_tui.control.client import ChatClient
from localllm_tui.control.session import Session


@dataclass(frozen=True, slots=True)
class Typed:
    """What is in the input: its text, the files that go with it, and the question it is another version of (None: it is new)."""

    text: str
    attached: Sequence[tuple[str, str]] = ()
    instead: StoredMessage | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.text.strip() and not self.attached

    def messages(self, session: Session, *, alone: bool = False) -> list[dict[str, str]]:
        """What would be sent; `alone`: without what was said before."""
        return session.would_send(self.text, self.attached, instead=self.instead, alone=alone)


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens: the conversation as it is, and with what is typed (None: nothing is). None: the server can't tell."""

    said: int | None = None
    asked: int | None = None

    @classmethod
    async def of(cls, client: ChatClient, model: str, session: Session, typed: Typed) -> Cost:
        """Counted by the server, where it did not count already."""
        said = session.used_tokens if session.counted else await client.count(model, session.context())
        asked = None if typed.empty else await client.count(model, typed.messages(session))
        return cls(said, asked)

    def words(self, n_ctx: int | None) -> str:
        """What sending costs, for the input's frame; "" where nothing is typed or known."""
        if self.asked is None:
            return ""
        if n_ctx is None:
            return f"{self.asked:,} tokens in all"
        return f"{self.asked:,} of {n_ctx:,} tokens" + (": too long" if self.asked >= n_ctx else " in all")


async def check_fits(client: ChatClient, model: str, session: Session, typed: Typed, n_ctx: int | None) -> None:
    """Raise ContextLengthError for a question that the server would refuse for its length: unsent, it can be changed.

    A server that can't count is left to refuse by itself.
    """
    if n_ctx is None:
        return
    compacts = client.compacts or session.compacts
    messages = typed.messages(session, alone=compacts)
    if sum(len(m["content"].encode("utf-8", "replace")) for m in messages) < n_ctx // 2:
        return  # a token is a byte at least, and no template doubles a conversation
    tokens = await client.count(model, messages)
    if tokens is None or tokens < n_ctx:
        return
    alone = tokens if compacts else await client.count(model, typed.messages(session, alone=True))
    if alone is not None and alone >= n_ctx:
        raise ContextLengthError(
            f"this question alone is {alone:,} tokens, and the context is {n_ctx:,}: it was not sent",
            hint="shorten it, or start the chat with a larger --context",
        )
    raise ContextLengthError(
        f"with what was said before, this is {tokens:,} tokens, and the context is {n_ctx:,}: it was not sent",
        hint="shorten it, or let the oldest messages be left out: Ctrl+P, Compact the conversation",
    )
