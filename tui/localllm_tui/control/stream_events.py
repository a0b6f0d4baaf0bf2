"""The events of an answer's stream, and the figures at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens of one request as the server counted them (0: not reported).

    `cached`: the prompt tokens that came from the prefix cache; None if the server does not report
    them.
    """

    prompt: int = 0
    completion: int = 0
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of the answer, or of the model's thinking, which is not part of it."""

    text: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`done` of `total` prompt tokens are read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class WaitNote:
    """The server's state before it answers (queued, loading)."""

    note: str


@dataclass(frozen=True, slots=True)
class MessagesLeftOut:
    """The conversation did not fit: the server left out this many of its oldest messages."""

    messages: int


@dataclass(frozen=True, slots=True)
class IdenticalCalls:
    """The model called the tool `name` so many `times` in a row with the same arguments and the same
    result."""

    name: str
    times: int


@dataclass(frozen=True, slots=True)
class AnswerTimings:
    """The times of an answer as the server measured them, in seconds, with the prompt tokens
    prefilled, the decode steps, and the tokens drafted and accepted."""

    queued_s: float = 0.0
    prefill_s: float = 0.0
    prefilled: int = 0
    decode_s: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """The answer is complete.

    `reason`: OpenAI's finish reason.
    `usage`, `timings`: None if the server did not send them.
    `cache_miss`: the server's reason if less of the prompt was cached than possible.
    """

    reason: str
    usage: AnswerUsage | None
    cache_miss: str = ""
    timings: AnswerTimings | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The model calls a tool; `arguments` as it wrote them, which should be a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call is allowed and runs."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool call with its result, or why it did not run."""

    call: ToolCall
    result: str
    allowed: bool


StreamEvent: TypeAlias = (
    TextDelta
    | PromptProgress
    | WaitNote
    | MessagesLeftOut
    | IdenticalCalls
    | ToolCall
    | ToolStarted
    | ToolResult
    | AnswerDone
)
