"""A whole reply is the stream, folded: collects what a Writer is told, for answers that are not streamed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from localllm.engine.messages import Timings, TokenLogprob
from localllm.server.generation.job import Outcome, ReplyUsage


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


class ReplyCollector:
    """The Writer that remembers everything."""

    def __init__(self, n: int = 1) -> None:
        self.choices = [CollectedChoice() for _ in range(n)]
        self.usage = ReplyUsage()
        self.timings = Timings()
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._thoughts: list[list[str]] = [[] for _ in range(n)]
        self._arguments: dict[tuple[int, int], list[str]] = {}

    def start(self) -> None:
        """Nothing to remember."""

    def text(self, choice: int, text: str, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Keep a piece of the answer."""
        self._texts[choice].append(text)
        self.choices[choice].logprobs.extend(logprobs)

    def reasoning(self, choice: int, text: str) -> None:
        """Keep a piece of the reasoning."""
        self._thoughts[choice].append(text)

    def call_start(self, choice: int, index: int, name: str) -> None:
        """A call begins."""
        self.choices[choice].calls.append(CollectedCall(new_call_id(), name))
        self._arguments[choice, index] = []

    def call_arguments(self, choice: int, index: int, text: str) -> None:
        """Keep a piece of its arguments."""
        self._arguments[choice, index].append(text)

    def finish(self, choice: int, outcome: Outcome) -> None:
        """Put the pieces together. A call that was cut off is none."""
        done = self.choices[choice]
        done.outcome = outcome
        if outcome.half_call:
            done.calls.pop()
        done.text = "".join(self._texts[choice])
        done.reasoning = "".join(self._thoughts[choice])
        for index, call in enumerate(done.calls):
            call.arguments = "".join(self._arguments[choice, index])

    def end(self, usage: ReplyUsage, timings: Timings) -> None:
        """Keep the sums."""
        self.usage, self.timings = usage, timings


def new_call_id() -> str:
    """An id for a tool call, unique over all replies."""
    return "call_" + secrets.token_hex(12)
