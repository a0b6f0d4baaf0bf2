"""Drive an Engine in a test: submit requests, step until all have ended, collect text and ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from localllm.engine.contention import CpuContention
from localllm.engine.core import Engine
from localllm.engine.messages import Event, Failure, Finish, Request, Sampling, Text, TokenLogprob

GREEDY = Sampling(temperature=0.0)
# For engines with an emulated clock: real CPU use of other programs would change the measurements.
ALONE = CpuContention(lambda: None)


@dataclass
class Outcome:
    """The output of each request. `ends` holds its Finish or Failure; there must be exactly one."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    ends: dict[str, list[Finish | Failure]] = field(default_factory=dict)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Text):
                assert event.id not in self.ends, "text after the end"
                self.text[event.id] = self.text.get(event.id, "") + event.text
                self.tokens.setdefault(event.id, []).extend(event.tokens)
                self.logprobs.setdefault(event.id, []).extend(event.logprobs)
            elif isinstance(event, Finish | Failure):
                self.ends.setdefault(event.id, []).append(event)

    def finish(self, request_id: str) -> Finish:
        (end,) = self.ends[request_id]
        assert isinstance(end, Finish), end
        return end

    def failure(self, request_id: str) -> Failure:
        (end,) = self.ends[request_id]
        assert isinstance(end, Failure), end
        return end


def advance(engine: Engine) -> list[Event]:
    """Do one iteration of the worker's loop: a step, or an idle tick if all requests only wait."""
    if engine.can_step:
        return engine.step()
    engine.idle()
    return []


def run(
    engine: Engine,
    *requests: Request,
    between: Callable[[int], None] | None = None,
    most: int = 5000,
) -> Outcome:
    """Submit all requests and step until all have ended. `between(n)` is called after step n."""
    outcome = Outcome()
    for request in requests:
        outcome.take(engine.submit(request, prompt_tokens(engine, request)))
    n = 0
    while engine.has_work:
        outcome.take(advance(engine))
        n += 1
        if between is not None:
            between(n)
        assert n < most, "the engine does not come to an end"
    engine.check_integrity()
    for request in requests:
        assert len(outcome.ends.get(request.id, [])) == 1, (
            f"{request.id} ended {outcome.ends.get(request.id)}"
        )
    return outcome


def prompt_tokens(engine: Engine, request: Request) -> list[int]:
    prompt = request.prompt
    return engine.backend.tokenize(prompt) if isinstance(prompt, str) else list(prompt)


def settle(engine: Engine) -> None:
    """Run `idle` until the housekeeping between requests is finished."""
    for _ in range(10_000):
        if not engine.idle():
            engine.check_integrity()
            return
    raise AssertionError("housekeeping never ends")
