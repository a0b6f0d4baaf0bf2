"""A long cached prefix is restored block by block between the steps of other requests. Interrupting
it loses no data."""

from __future__ import annotations

from typing import Any

import pytest

from engine.drive import GREEDY, Outcome, run, settle
from localllm.engine import EngineSettings
from localllm.engine.cache.eviction import Block
from localllm.engine.core import Engine
from localllm.engine.messages import Request
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

LONG = [40 + i % 97 for i in range(2000)]


class Noting(ScriptedBackend):
    """A backend that records imports and steps in the order in which they happen."""

    def __init__(self, n_ctx: int = 8192) -> None:
        super().__init__(n_ctx=n_ctx, n_batch=64)
        self.story: list[str] = []

    def import_range(self, *a: Any) -> None:
        self.story.append("import")
        super().import_range(*a)

    def step(self, chunks: Any) -> Any:
        self.story.append("step")
        return super().step(chunks)


def ask(key: str, prompt: list[int], n: int = 6) -> Request:
    return request_for(key, prompt, max_tokens=n, sampling=GREEDY, ignore_eos=True)


def cached(n_ctx: int = 8192) -> tuple[Engine, Noting]:
    """Return an engine that knows LONG from an earlier request, but not as its newest sequence, and
    has a running stream."""
    backend = Noting(n_ctx)
    engine = Engine(backend, EngineSettings(headroom_bytes=0))
    run(engine, ask("earlier", LONG))
    settle(engine)
    engine.submit(ask("stream", [7, 8, 9], 400), [7, 8, 9])
    for _ in range(5):
        engine.step()
    backend.story.clear()
    return engine, backend


def alone(prompt: list[int], n: int = 6) -> list[int]:
    return run(Engine(ScriptedBackend(n_ctx=8192, n_batch=64)), ask("a", prompt, n)).tokens["a"]


def finish(engine: Engine, outcome: Outcome) -> None:
    while engine.has_work:
        outcome.take(engine.step())
        engine.check_integrity()


def test_a_stream_gets_a_token_between_two_restored_blocks() -> None:
    engine, backend = cached()
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    while "again" not in outcome.tokens:
        outcome.take(engine.step())
    assert backend.story.count("import") > 2
    pairs = list(zip(backend.story, backend.story[1:], strict=False))
    assert ("import", "import") not in pairs
    finish(engine, outcome)
    assert outcome.tokens["again"] == alone(prompt)
    assert outcome.finish("again").usage.cached_tokens >= len(LONG) - 1


def test_without_other_streams_a_prefix_is_restored_in_one_step() -> None:
    engine, backend = cached()
    engine.cancel("stream")
    backend.story.clear()
    prompt = [*LONG, 5, 6]
    engine.submit(ask("again", prompt), prompt)
    engine.step()
    assert backend.story.count("import") > 2
    assert backend.story.count("step") == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_request_cancelled_during_restoration_leaves_the_cache_intact(steps: int) -> None:
    engine, _ = cached()
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    for _ in range(steps):
        outcome.take(engine.step())
    outcome.take(engine.cancel("again"))
    engine.check_integrity()
    engine.pool.cache.budget.shrink(10**12)
    engine.check_integrity()
    assert engine.pool.cache.held_bytes == 0, "nothing is locked any more"
    finish(engine, outcome)


def test_a_block_lost_during_restoration_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = cached()
    reads: list[bool] = []

    def read(block: Block) -> bytes | memoryview | None:
        reads.append(len(reads) != 1)
        return block.data if reads[-1] else None

    monkeypatch.setattr(engine.pool.kv, "read", read)
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    finish(engine, outcome)
    assert reads == [True, False, True, True], (
        "what is lost is computed, and the rest is still taken"
    )
    assert outcome.tokens["again"] == alone(prompt)
    assert len(LONG) - 600 <= outcome.finish("again").usage.cached_tokens < len(LONG) - 500
    snapshot = engine.snapshot()
    assert snapshot["lost_blocks"] == 1
    assert snapshot["recomputed_lost_tokens"] == 512
    reads.extend([True] * 10)
    assert run_again(engine, prompt) >= len(LONG), "what was computed is in the cache again"


def run_again(engine: Engine, prompt: list[int]) -> int:
    settle(engine)
    run(engine, ask("between", [7, 7, 7, *range(40, 60)]))
    usage = run(engine, ask("once-more", [*prompt, 9])).finish("once-more").usage
    return usage.cached_tokens


def test_a_short_new_request_does_not_wait_for_a_long_restoration() -> None:
    engine, _ = cached()
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt), prompt))
    outcome.take(engine.submit(ask("short", [11, 12, 13]), [11, 12, 13]))
    while "short" not in outcome.tokens:
        outcome.take(engine.step())
    assert "again" not in outcome.tokens
    finish(engine, outcome)
    assert outcome.tokens["short"] == alone([11, 12, 13])
    assert outcome.tokens["again"] == alone(prompt)


def test_a_restored_request_answers_correctly_in_a_tight_context() -> None:
    engine, _ = cached(n_ctx=2300)
    prompt = [*LONG, 5, 6]
    outcome = Outcome()
    outcome.take(engine.submit(ask("again", prompt, 60), prompt))
    finish(engine, outcome)
    assert outcome.tokens["again"] == alone(prompt, 60)
