"""What is told of a reply as it comes, and what reads the calls in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins: its number within the reply and the function's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A fragment of the JSON text of call `index`'s arguments."""

    index: int
    text: str


Delta: TypeAlias = Content | ReasoningText | CallStart | CallArguments


class CallReader(Protocol):
    """Reads the calls of one format once their opening marker was seen (see conversation.tools)."""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain so far."""
        ...

    def close(self, cut: bool) -> list[Delta]:
        """The reply ended, `cut` off or by itself; what could not be read as a call comes back as Content, but what a
        cut left half is neither."""
        ...

    @property
    def rest(self) -> str | None:
        """Text after the last call, once the format says that the calls are over; None before."""
        ...
