"""Shared helpers of the tests of sliced prefill: a scripted backend that prefills in slices, and
streams and prompts to run at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Request
from localllm_backends.contract import BackendFailure, OutOfMemoryError, PrefillSlices
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

MB = 10**6


class ScriptedSlices(PrefillSlices):
    """Prefill 10 tokens a slice and import them 20 at a time with the scripted backend's own
    import."""

    def __init__(self, backend: SlicedBackend, sequence: int, tokens: list[int]) -> None:
        self.backend, self.sequence, self.tokens = backend, sequence, tokens
        self.read = self.joined = 0
        self.slices: list[float] = []
        self.stopped = self.closed = False

    def run(self, seconds: float) -> int:
        if self.backend.fails_at is not None and self.read >= self.backend.fails_at:
            raise BackendFailure("the kernel said no")
        self.slices.append(seconds)
        self.read = min(len(self.tokens), self.read + 10)
        return self.read

    def stop(self) -> int:
        assert not self.stopped
        self.stopped = True
        self.read = min(len(self.tokens), self.read + self.backend.done_at_the_stop)
        return self.read

    def join(self) -> int:
        part = self.tokens[self.joined : min(self.read, self.joined + 20)]
        scratch = ScriptedBackend(n_ctx=4096)
        line = scratch.new_sequence()
        start = self.backend.length(self.sequence)
        scratch.lines[line] = [0] * start + part
        data = scratch.export_range(line, start, start + len(part))
        self.backend.import_range(self.sequence, data, start, start + len(part))
        self.joined += len(part)
        return len(self.tokens) - self.joined

    def close(self) -> None:
        assert not self.closed
        self.closed = True


class SlicedBackend(ScriptedBackend):
    """A scripted backend that can prefill in slices."""

    def __init__(
        self, *, fails_at: int | None = None, refuses: bool = False, n_ctx: int = 2048
    ) -> None:
        super().__init__(n_ctx=n_ctx)
        self.capabilities = replace(self.capabilities, sliced_prefill=True)
        self.slices: list[ScriptedSlices] = []
        self.fails_at, self.refuses = fails_at, refuses
        # Tokens that the current piece still finishes while it is being stopped.
        self.done_at_the_stop = 0

    def sliced_prefill_bytes(self, n_tokens: int) -> int:
        return n_tokens * MB

    def slice_prefill(self, sequence: int, tokens: list[int]) -> ScriptedSlices:
        if self.refuses:
            raise OutOfMemoryError("no memory for another context")
        self.slices.append(ScriptedSlices(self, sequence, list(tokens)))
        return self.slices[-1]


def engine_of(
    backend: SlicedBackend, available: int = 10**12, clock: Callable[[], float] = time.monotonic
) -> Engine:
    settings = EngineSettings(sliced_prefill_tokens=50, headroom_bytes=100 * MB)
    return Engine(backend, settings, available=lambda: available, clock=clock)


def words(n: int, seed: int) -> list[int]:
    return [3 + (i * 7 + seed * 31) % 250 for i in range(n)]


def ask(key: str, prompt: list[int], n: int = 8, prediction: str = "") -> Request:
    return request_for(
        key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True, prediction=prediction
    )


def start(engine: Engine, *requests: Request) -> Outcome:
    """Submit the requests and step until each has its first token."""
    outcome = Outcome()
    for request in requests:
        outcome.take(engine.submit(request, list(request.prompt)))  # type: ignore[arg-type]
    while not all(r.id in outcome.tokens for r in requests):
        outcome.take(engine.step())
    return outcome


def expected(prompt: list[int], n: int) -> list[int]:
    engine = Engine(ScriptedBackend(n_ctx=2048))
    return run(engine, ask("alone", prompt, n)).tokens["alone"]


def finish(engine: Engine, outcome: Outcome) -> None:
    while engine.has_work:
        outcome.take(engine.step())
        engine.check_integrity()
