"""What is to be generated, how it is told, and how it ended: the values between the dialects and the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

from localllm.conversation.reply import ReplyFormat
from localllm.conversation.tools.base import GrammarTrigger
from localllm.engine.messages import Generation, Timings, TokenLogprob, Usage

_MAX_NOTE_CHARS = 500

Reason = Literal["stop", "length", "tool_calls", "repetition"]
# The answer was cut: what it says is not all it would have said.
CUT: tuple[Reason, ...] = ("length", "repetition")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What is known of an answer before it is made: how the engine holds it to a form, and how its text is read.

    `prefix` is the beginning of the answer that is already known (a forced call): it is put behind the prompt and read
    as if the model had written it. When the prompt leaves the model reasoning, `grammar` and `prefix` wait until it
    has finished. `begun` is the beginning that the client gave, which is in the prompt: `grammar` goes on behind it.
    `calls`: what must follow the openings of the calls that the model may begin. `control`: the reply's
    markers are control tokens, which the engine must render. `marks` end the answer: of a format that the model was not
    made for, so that they are text to it.
    """

    reply: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: tuple[str, str] | None = None
    prefix: str = ""
    calls: Mapping[str, GrammarTrigger] = field(default_factory=dict)
    control: bool = False
    begun: str = ""
    marks: tuple[str, ...] = ()

    @property
    def reasons_first(self) -> bool:
        """True when the constraint must wait for the end of the reasoning."""
        return self.reply.thinking and (self.grammar is not None or bool(self.prefix))


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """`n` choices for `prompt` and for each prompt in `also` (text or token ids), independent of any dialect.

    `images`: files in base64, each by the mark that stands for it in a prompt. `ignored` names fields that have no
    effect on this model, `normalised` what was taken out of the prompt, `compacted` how much of the conversation was
    left out; `asked` is the turn that is answered, where the reasoning behind the answer is to be remembered.
    """

    prompt: str | list[int]
    generation: Generation
    answer: AnswerPlan = field(default_factory=AnswerPlan)
    also: tuple[str | list[int], ...] = ()
    add_bos: bool = True
    n: int = 1
    ignored: tuple[str, ...] = ()
    normalised: tuple[str, ...] = ()
    compacted: str = ""
    asked: str | None = None
    images: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        """How many choices the reply has."""
        return self.n * (1 + len(self.also))


@dataclass(frozen=True, slots=True)
class ReplyUsage(Usage):
    """The engine's counts, and how many of the completion's tokens were reasoning."""

    reasoning_tokens: int = 0

    @classmethod
    def of(cls, usage: Usage, reasoning_tokens: int) -> ReplyUsage:
        """`usage` with the reasoning counted."""
        return cls(**{f.name: getattr(usage, f.name) for f in fields(usage)}, reasoning_tokens=reasoning_tokens)

    @property
    def cache_note(self) -> str:
        """What the prefix cache did, in one line of ASCII that fits a header."""
        said = f"{self.cached_tokens}/{self.prompt_tokens} tokens"
        if self.cache_miss:
            said += f"; {self.cache_miss}"
        return "".join(c if " " <= c <= "~" else "?" for c in said)[:_MAX_NOTE_CHARS]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one choice ended. `half_call`: the last call was cut off within its arguments, which are no JSON."""

    reason: Reason
    usage: ReplyUsage
    timings: Timings
    stop: str | None = None
    half_call: bool = False


class ReplyWriter(Protocol):
    """A dialect's way to write down a reply as it happens. Calls come in order: `start`, any number of the middle
    ones, one `finish` per choice, `end`; or `error` at any point, after which nothing comes."""

    def start(self) -> None:
        """The engine has taken the request."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """More of the answer."""

    def reasoning(self, choice: int, text: str) -> None:
        """More of the reasoning."""

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A tool call begins."""

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of its arguments."""

    def finish(self, choice: int, outcome: Outcome) -> None:
        """A choice ended."""

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        """Everything ended; the sums over the choices."""


@dataclass(slots=True)
class PrefillProgress:
    """Where a job stands, for keep-alive comments. `loaded`: how much of its model is, from 0 to 1. `written`: tokens of
    the answer so far."""

    loaded: float = 0.0
    done: int = 0
    total: int = 0
    cached: int = 0
    written: int = 0
    ahead: int = 0
    accepted: bool = False

    def __str__(self) -> str:
        if self.total:
            return f"prefill {self.done}/{self.total} tokens, {self.cached} cached"
        if self.accepted:
            return f"queued, {self.ahead} ahead"
        if self.loaded >= 1:
            return "preparing the prompt"
        # 0 is also what a worker says that can't tell.
        return f"loading, {self.loaded:.0%}" if self.loaded else "loading"
