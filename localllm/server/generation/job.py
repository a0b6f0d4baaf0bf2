"""Values passed between the dialects and the engine: the job to generate, how it is reported and
collected, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.conversation.context_edits import AppliedEdit
from localllm.conversation.repeated_calls import RepeatedCall
from localllm.conversation.reply import ReplyFormat
from localllm.conversation.summary import Summary
from localllm.conversation.tools.base import GrammarTrigger
from localllm.engine.messages import Generation, SharedPrefix, Timings, TokenLogprob, Usage
from localllm.server.http.asgi import header_text, new_id

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
    - `beginning`: the client's beginning of the answer, which is already in the prompt. `grammar`
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
    beginning: str = ""
    marks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyUsage(Usage):
    """The engine's counts, and the number of reasoning tokens in the completion."""

    reasoning_tokens: int = 0

    @property
    def cache_note(self) -> str:
        """Prefix cache hits, the reason for misses, and the server that read the rest, as one line of ASCII that fits into a
        header."""
        note = f"{self.cached_tokens}/{self.prompt_tokens} tokens"
        if self.cache_miss:
            note += f"; {self.cache_miss}"
        if self.fetched_tokens:
            note += f"; {self.fetched_tokens} tokens were read by {self.fetched_from}"
        return "".join(c if " " <= c <= "~" else "?" for c in note)[:_MAX_NOTE_CHARS]


@dataclass(frozen=True, slots=True)
class WrittenSummary:
    """A summary that the model wrote before an answer, and what it cost. `summary` is None if the
    model wrote no text."""

    summary: Summary | None
    usage: ReplyUsage


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A job of `n` choices for `prompt`, and for each prompt in `also` (text or token ids). It does
    not depend on the dialect.

    - `images`: files in base64, by the mark that represents each in a prompt.
    - `ignored`: names of fields without effect on this model.
    - `normalised`: volatile text that was removed from the prompt.
    - `compacted`: how much of the conversation was left out.
    - `repeated`: a call that the newest rounds of the conversation repeat.
    - `applied`: the context edits that changed the conversation. `original_tokens`: the prompt's
      tokens before them, if the client sent edits.
    - `summary`: it replaced the conversation. `pauses`: the reply ends after it, without an answer.
    - `question`: the turn to answer, if its reasoning goes to the reasoning cache.
    - `hides_reasoning`: the reasoning goes only to that cache.
    - `reports_tokens`: the writer gets the ids of all tokens.
    - `shared`: the beginning of the prompt that other servers may have read.
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
    repeated: RepeatedCall | None = None
    applied: tuple[AppliedEdit, ...] = ()
    original_tokens: int = 0
    summary: WrittenSummary | None = None
    pauses: bool = False
    question: str | None = None
    hides_reasoning: bool = False
    reports_tokens: bool = False
    media: dict[str, str] = field(default_factory=dict)
    shared: SharedPrefix | None = None

    @property
    def choices(self) -> int:
        return self.n * (1 + len(self.also))

    @property
    def notes(self) -> list[str]:
        """Facts about the conversation, which streams send as comments."""
        notes = []
        if self.compacted:
            notes.append(f"compacted {self.compacted}")
        if self.repeated is not None:
            notes.append(header_text(f"identical calls {self.repeated}"))
        return notes


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one choice ended. `incomplete_call`: the last call was cut off, so its arguments are not
    valid JSON."""

    reason: Reason
    usage: ReplyUsage
    timings: Timings
    stop: str | None = None
    incomplete_call: bool = False


class ReplyWriter:
    """Writes a reply while it is generated. A dialect overrides the methods it needs.

    Methods are called in order: `start`, then any of the middle ones, then `end`. An error may
    occur at any point.
    """

    def start(self) -> None:
        """The engine has accepted the request."""

    def prefill(self) -> None:
        """More of the prompt was computed, see the job's PrefillProgress."""

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
    """One choice; `outcome` is set when it has finished. The last of `started_calls` may be cut off
    within its arguments."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    started_calls: list[CollectedCall] = field(default_factory=list)
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
        if self.outcome.incomplete_call:
            return self.started_calls[:-1]
        return self.started_calls


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete reply: every choice in order, and the sums over them."""

    choices: list[CollectedChoice]
    usage: ReplyUsage
    timings: Timings


def empty_reply() -> Reply:
    """A reply without an answer."""
    choice = CollectedChoice()
    choice.outcome = Outcome("stop", ReplyUsage(), Timings())
    return Reply([choice], ReplyUsage(), Timings())
