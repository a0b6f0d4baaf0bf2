"""The pool remembers comparisons of waiting requests. A remembered result always equals that of a
new lookup."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome
from localllm.engine import EngineSettings, admission
from localllm.engine.cache import matching, pool, tree
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.matching import PrefixSource, PromptMatch
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.store import KvStore
from localllm.engine.cache.tree import as_tokens
from localllm.engine.core import Engine
from localllm.engine.request import RunningRequest
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import TURN, ScriptedBackend

SYSTEM = [TURN, *([40] * 300)]


def prompt_of(i: int, n: int) -> list[int]:
    return [*SYSTEM, TURN, *([50 + i] * n)]


def test_a_step_compares_no_waiting_prompt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four requests run and eight of 1,200 tokens wait: a step compares only new tokens."""
    looked_at = 0

    def counting(module: object, name: str) -> None:
        plain = getattr(module, name)

        def counted(tokens: object, *more: object) -> object:
            nonlocal looked_at
            looked_at += len(tokens)  # type: ignore[arg-type]
            return plain(tokens, *more)

        monkeypatch.setattr(module, name, counted)

    for module in (admission, matching, tree, pool):
        for name in ("as_tokens", "common_prefix"):
            if hasattr(module, name):
                counting(module, name)
    engine = Engine(
        ScriptedBackend(n_ctx=4800, n_batch=512, n_seq_max=16), EngineSettings(cache_bytes=2**20)
    )
    for i in range(12):
        prompt = prompt_of(i, 900)
        engine.submit(request_for(f"r{i}", prompt, 400, GREEDY, ignore_eos=True), prompt)
    while len(engine.jobs.running) < 4 or any(
        job.prefilling for job in engine.jobs.running.values()
    ):
        engine.step()
    assert len(engine.jobs.waiting) == 8
    engine.step()
    looked_at = 0
    for _ in range(10):
        engine.step()
    assert (len(engine.jobs.waiting), len(engine.jobs.running)) == (8, 4)
    assert looked_at <= 10 * 4 * 8, "more than every waiting prompt with every new token"


# --- remembered comparisons -----------------------------------------------------------------------


def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Repeat every later lookup without remembered results and compare both. Return a counter of
    the lookups that found a prefix to reuse."""
    plain = SequencePool.lookup
    agreed = [0]

    def twice(
        pool: SequencePool, prompt: PromptMatch, live: Iterable[RunningRequest]
    ) -> PrefixSource:
        running = list(live)
        found = plain(pool, prompt, running)
        assert found == plain(pool, PromptMatch(prompt.tokens), running)
        agreed[0] += found.length > 0
        return found

    monkeypatch.setattr(SequencePool, "lookup", twice)
    return agreed


def turn(word: int, n: int) -> list[int]:
    return [TURN, *([word] * n)]


PARTS = st.sampled_from([turn(40, 40), turn(41, 9), turn(42, 25), turn(43, 3)])


@pytest.mark.parametrize("segments", [True, False])
def test_a_cached_match_equals_a_new_lookup(
    monkeypatch: pytest.MonkeyPatch, segments: bool
) -> None:
    agreed = checked(monkeypatch)
    rewind = "any" if segments else "none"

    @settings(max_examples=examples(40))
    @given(
        mix=st.lists(
            st.tuples(
                st.lists(PARTS, min_size=1, max_size=5),
                st.integers(1, 25),
                st.integers(0, 8),
                st.booleans(),
            ),
            min_size=2,
            max_size=10,
        ),
        cache_bytes=st.sampled_from([600, 4000, 10**7]),
        n_ctx=st.sampled_from([192, 300, 1024]),
        disk=st.booleans(),
    )
    def histories(
        mix: list[tuple[list[list[int]], int, int, bool]], cache_bytes: int, n_ctx: int, disk: bool
    ) -> None:
        with TemporaryDirectory() as folder:
            backend = ScriptedBackend(n_ctx=n_ctx, n_batch=32, segments=segments, rewind=rewind)  # type: ignore[arg-type]
            where = str(Path(folder)) if disk else None
            engine = Engine(backend, EngineSettings(cache_bytes=cache_bytes, disk_dir=where))
            outcome = Outcome()
            for i, (parts, n, steps, cancel) in enumerate(mix):
                prompt = [token for part in parts for token in part]
                request = request_for(f"r{i}", prompt, n, GREEDY, ignore_eos=True)
                outcome.take(engine.submit(request, prompt))
                for _ in range(steps):
                    outcome.take(engine.step())
                if cancel:
                    outcome.take(engine.cancel(f"r{i}"))
            for _ in range(3000):
                if engine.has_work:
                    outcome.take(engine.step())
            assert not engine.has_work
            assert len(outcome.ends) == len(mix)
            engine.close()

    histories()
    # Otherwise the histories reuse too little for a meaningful test. Indivisible snapshots are
    # seldom reused.
    assert agreed[0] > (20 if segments else 5)


def test_a_lost_block_is_not_remembered() -> None:
    backend = ScriptedBackend()
    pool = SequencePool(backend, KvStore(backend, 100))
    line = as_tokens(range(3, 53))
    block = Block(b"", 0, len(line))
    pool.cache.insert(line, block)
    prompt = PromptMatch([*line.tolist(), 60])
    assert pool.lookup(prompt, ()).length == 50
    pool.kv.lost(block)
    assert pool.lookup(prompt, ()).length == 0
