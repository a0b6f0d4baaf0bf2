"""The deltas that a model's reply is told in, and the format that says how to read it
(reply_parser.py reads it)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
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


class CallReader(ABC):
    """Reads the calls of one format once their opening marker was seen (see conversation.tools).
    `rest`: text after the last call, once the format says that the calls are over; None before."""

    rest: str | None = None

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain so far."""

    @abstractmethod
    def close(self, cut: bool) -> list[Delta]:
        """The reply ended, `cut` off or by itself; what could not be read as a call comes back as
        Content, but what a cut left half is neither."""


class TurnEnd(str):
    """A marker to leave out, behind which nothing belongs to the reply."""

    __slots__ = ()


Drop: TypeAlias = str | tuple[str, str]
"""Structure to leave out: one marker, or everything from an opening marker to a closing one."""


# Texts that end a turn and that no answer contains; some files don't mark them as the end of
# generation.
_TURN_ENDS = ("<|role_end|>",)


def turn_ends(template: str) -> tuple[str, ...]:
    return tuple(end for end in _TURN_ENDS if end in template)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to read one reply.
    `thinking` says that the prompt already opened the reasoning.
    `call_markers` open tool calls, `new_reader(calls so far, marker)` reads them.
    `drops` are structure to leave out; a format that has them marks everything, so any marker ends
    the reasoning and half a marker at the reply's end is not shown.
    `parallel` False lets only the first call through.
    `calls_in_reasoning`: calls may come before the reasoning's end;
    `quotable`: their markers are text, which a thought may mention within a line. Behind one of
    `ends` nothing belongs to the reply. `lead` stands at the prompt's end and belongs to the first
    marker."""

    think: tuple[str, str] | None = None
    thinking: bool = False
    call_markers: Sequence[str] = ()
    new_reader: Callable[[int, str], CallReader] | None = None
    drops: Sequence[Drop] = ()
    parallel: bool = True
    calls_in_reasoning: bool = False
    quotable: bool = True
    ends: Sequence[str] = ()
    lead: str = ""

    @property
    def plain(self) -> bool:
        """True when every text is the answer."""
        return self.think is None and not self.call_markers and not self.drops and not self.ends
