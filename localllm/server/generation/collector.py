"""Collects a reply: a whole answer is the stream, folded."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from localllm.engine.messages import Timings, TokenLogprob
from localllm.server.generation.job import Outcome, ReplyUsage, ReplyWriter
from localllm.server.http.asgi import new_id


@dataclass
class CollectedCall:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass
class CollectedChoice:
    """One choice; `outcome` once it has finished. `begun_calls` may end in one that was cut off within its arguments."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    begun_calls: list[CollectedCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outcome: Outcome = field(init=False)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)

    @property
    def calls(self) -> list[CollectedCall]:
        return self.begun_calls[:-1] if self.outcome.half_call else self.begun_calls


class ReplyCollector(ReplyWriter):
    """Collects a reply, and passes it on to `inner`."""

    def __init__(self, inner: ReplyWriter | None = None) -> None:
        self._inner = inner or ReplyWriter()
        self._choices: defaultdict[int, CollectedChoice] = defaultdict(CollectedChoice)
        self.usage = ReplyUsage()
        self.timings = Timings()

    @property
    def choices(self) -> list[CollectedChoice]:
        """Every choice, in order."""
        return [choice for _, choice in sorted(self._choices.items())]

    def start(self) -> None:
        self._inner.start()

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._choices[choice].texts.append(text)
        self._choices[choice].logprobs += logprobs
        self._inner.text(choice, text, logprobs)

    def reasoning(self, choice: int, text: str) -> None:
        self._choices[choice].thoughts.append(text)
        self._inner.reasoning(choice, text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._choices[choice].begun_calls.append(CollectedCall(new_id("call_"), name))
        self._inner.call_start(choice, index, name)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        self._choices[choice].begun_calls[index].pieces.append(text)
        self._inner.call_arguments(choice, index, text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        self._choices[choice].outcome = outcome
        self._inner.finish(choice, outcome)

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        self.usage, self.timings = usage, timings
        self._inner.end(usage, timings)
