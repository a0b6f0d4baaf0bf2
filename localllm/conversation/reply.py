"""The deltas of a model's reply, and the format that describes how reply_parser.py reads it."""

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
    """Reads the calls of one format after their opening marker (see conversation.tools).

    `rest` is the text after the last call once the calls are over, and None before.
    """

    rest: str | None = None

    @abstractmethod
    def feed(self, text: str) -> list[Delta]:
        """Take more text and return the deltas that are certain so far."""

    @abstractmethod
    def close(self, cut: bool) -> list[Delta]:
        """End of the reply, `cut` off or by itself.

        Text that could not be read as a call is returned as Content. An incomplete call at a cut is
        dropped.
        """


class TurnEnd(str):
    """A marker to leave out. All text after it is ignored."""

    __slots__ = ()


Drop: TypeAlias = str | tuple[str, str]
"""Text to remove from the reply: one marker, or everything from an opening to a closing marker."""


# Texts that end a turn and that no answer contains. Some files don't mark them as the end of
# generation.
_TURN_ENDS = ("<|role_end|>",)


def turn_ends(template: str) -> tuple[str, ...]:
    return tuple(end for end in _TURN_ENDS if end in template)


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How to read one reply.

    - `think`: the markers of the reasoning.
    - `thinking`: the prompt already opened the reasoning.
    - `call_markers`: markers that open tool calls. `new_reader(calls so far, marker)` reads them.
    - `drops`: structure to leave out. A format with drops marks everything, so any marker ends the
      reasoning, and an incomplete marker at the reply's end is not shown.
    - `parallel`: if False, only the first call is passed on.
    - `calls_in_reasoning`: calls may come before the reasoning's end.
    - `quotable`: the markers of calls are text, which reasoning may mention within a line.
    - `ends`: texts that end the reply. All text after them is ignored.
    - `lead`: text at the prompt's end that belongs to the first marker.
    """

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
        """True if all text is the answer."""
        return self.think is None and not self.call_markers and not self.drops and not self.ends
