"""Values passed between the dialects and the engine: the job to generate, how it is reported and
collected, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.conversation.reply import ReplyFormat
from localllm.conversation.tools.base import GrammarTrigger
from localllm.engine.messages import Generation, Timings, TokenLogprob, Usage
from localllm.server.http.asgi import new_id

_MAX_NOTE_CHARS = 500

Reason = Literal["stop", "length", "tool_calls", "repetition"]
# Finish reasons of an answer that was cut off.
CUT: tuple[Reason, ...] = ("length", "repetition")


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the engine constrains an answer, and how its text is parsed.

    - `prefix`: a known beginning of the answer (a forced call). It is appended to the prompt and
      parsed as if the model had written it. If the prompt ends inside a reasoning block, `grammar`
      and `prefix` wait until that block is closed.
    - `begun`: the client's beginning of the answer, which is already in the prompt. `grammar`
      continues after it.
    - `calls`: the grammar of the text after the opening of a tool call, by that opening.
    - `control`: the markers are control tokens, which the engine must render.
    - `marks`: turn ends of a format that the model was not trained on, so they appear as plain
      text.
    """

    reply: ReplyFormat = field(default_factory=ReplyFormat)
    grammar: tuple[str, str] | None = None
    prefix: str = ""
    calls: Mapping[str, GrammarTrigger] = field(default_factory=dict)
    control: bool = False
    begun: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A job of `n` choices for `prompt`, and for each prompt in `also` (text or token ids). It does
    not depend on the dialect.

    - `images`: files in base64, by the mark that represents each in a prompt.
    - `ignored`: names of fields without effect on this model.
    - `normalised`: volatile text that was removed from the prompt.
    - `compacted`: how much of the conversation was left out.
    - `asked`: the turn to answer, if its reasoning goes to the reasoning cache.
    - `hides_reasoning`: the reasoning goes only to that cache.
    - `reports_tokens`: the writer gets the ids of all tokens.
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
    hides_reasoning: bool = False
    reports_tokens: bool = False
    images: dict[str, str] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return self.n * (1 + len(self.also))


@dataclass(frozen=True, slots=True)
class ReplyUsage(Usage):
    """The engine's counts, and the number of reasoning tokens in the completion."""

    reasoning_tokens: int = 0

    @property
    def cache_note(self) -> str:
        """Prefix cache hits and the reason for misses, as one line of ASCII that fits into a
        header."""
        said = f"{self.cached_tokens}/{self.prompt_tokens} tokens"
        if self.cache_miss:
            said += f"; {self.cache_miss}"
        return "".join(c if " " <= c <= "~" else "?" for c in said)[:_MAX_NOTE_CHARS]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one choice ended. `half_call`: the last call was cut off, so its arguments are not valid
    JSON."""

    reason: Reason
    usage: ReplyUsage
    timings: Timings
    stop: str | None = None
    half_call: bool = False


class ReplyWriter:
    """Writes a reply while it is generated. A dialect overrides the methods it needs.

    Methods are called in order: `start`, then any of the middle ones, then `end`. An error may
    occur at any point.
    """

    def start(self) -> None:
        """The engine has accepted the request."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """More of the answer."""

    def tokens(self, choice: int, ids: tuple[int, ...]) -> None:
        """More tokens, shown or not. Called only if the job reports them."""

    def reasoning(self, choice: int, text: str) -> None:
        """More of the reasoning."""

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A tool call begins."""

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """A fragment of the call's arguments, as JSON text."""

    def end(self, reply: Reply) -> None:
        """Every choice has ended."""


@dataclass(slots=True)
class PrefillProgress:
    """Progress of a job, for keep-alive comments. `loaded`: loaded share of the model (0 to 1).
    `written`: tokens of the answer so far."""

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
        # 0 may also mean that the worker does not know the share.
        if self.loaded:
            return f"loading, {self.loaded:.0%}"
        return "loading"


def _call_id() -> str:
    return new_id("call_")


@dataclass
class CollectedCall:
    """One tool call; `arguments` is JSON text."""

    name: str
    id: str = field(default_factory=_call_id)
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class CollectedChoice:
    """One choice; `outcome` is set when it has finished. The last of `begun_calls` may be cut off
    within its arguments."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    begun_calls: list[CollectedCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    outcome: Outcome = field(init=False)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def calls(self) -> list[CollectedCall]:
        if self.outcome.half_call:
            return self.begun_calls[:-1]
        return self.begun_calls


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply: every choice in order, and the sums over them."""

    choices: list[CollectedChoice]
    usage: ReplyUsage
    timings: Timings
