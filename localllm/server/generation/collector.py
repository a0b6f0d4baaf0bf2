"""Reply writers of our own: one collects the stream into a whole reply, one records reasoning for later turns."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from localllm.conversation.prefix_reuse import ReasoningCache
from localllm.engine.messages import Timings, TokenLogprob
from localllm.server.generation.job import Outcome, ReplyUsage, ReplyWriter


@dataclass
class CollectedCall:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class CollectedChoice:
    """One finished choice."""

    text: str = ""
    reasoning: str = ""
    calls: list[CollectedCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    outcome: Outcome | None = None


class ReplyCollector(ReplyWriter):
    """Collects a reply that is not streamed."""

    def __init__(self, n: int = 1) -> None:
        self.choices = [CollectedChoice() for _ in range(n)]
        self.usage = ReplyUsage()
        self.timings = Timings()
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._thoughts: list[list[str]] = [[] for _ in range(n)]
        self._arguments: dict[tuple[int, int], list[str]] = {}

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._texts[choice].append(text)
        self.choices[choice].logprobs.extend(logprobs)

    def reasoning(self, choice: int, text: str) -> None:
        self._thoughts[choice].append(text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        self.choices[choice].calls.append(CollectedCall(new_call_id(), name))
        self._arguments[choice, index] = []

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        self._arguments[choice, index].append(text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        done = self.choices[choice]
        done.outcome = outcome
        if outcome.half_call:  # cut off within its arguments: no call
            done.calls.pop()
        done.text = "".join(self._texts[choice])
        done.reasoning = "".join(self._thoughts[choice])
        for index, call in enumerate(done.calls):
            call.arguments = "".join(self._arguments[choice, index])

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        self.usage, self.timings = usage, timings


def new_call_id() -> str:
    """An id for a tool call, unique over all replies."""
    return "call_" + secrets.token_hex(12)


class ReasoningRecorder(ReplyWriter):
    """Passes everything on to `inner`, and puts each choice's reasoning into the reasoning cache."""

    def __init__(self, inner: ReplyWriter, cache: ReasoningCache, asked: str) -> None:
        self._inner, self._cache, self._asked = inner, cache, asked
        self._said: dict[int, tuple[list[str], list[str], list[list[str]]]] = {}

    def start(self) -> None:
        self._inner.start()

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        self._inner.end(usage, timings)

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        self._of(choice)[0].append(text)
        self._inner.text(choice, text, logprobs)

    def reasoning(self, choice: int, text: str) -> None:
        self._of(choice)[1].append(text)
        self._inner.reasoning(choice, text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        self._of(choice)[2].append([name])
        self._inner.call_start(choice, index, name)

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        self._of(choice)[2][-1].append(text)
        self._inner.call_arguments(choice, index, text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        texts, thoughts, calls = self._of(choice)
        parts = [(c[0], "".join(c[1:])) for c in calls]
        self._cache.remember(self._asked, "".join(texts), parts, "".join(thoughts))
        self._inner.finish(choice, outcome)

    def _of(self, choice: int) -> tuple[list[str], list[str], list[list[str]]]:
        return self._said.setdefault(choice, ([], [], []))
