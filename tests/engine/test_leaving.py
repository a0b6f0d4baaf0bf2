"""A finished sequence leaves the live context once it is in the cache's memory, whatever was cached
before it, in this process or an earlier one.

Every token resident in a unified KV cache slows every other sequence, so a server in use for days
must be as fast as a fresh one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, prompt_tokens, run, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.step_costs import PrefillCost
from localllm_backends.contract import Backend, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.examples import examples
from support.requests import request_for
from support.scripted_backend import ScriptedBackend, ScriptedResult

HEAD = [259, *[40 + i % 50 for i in range(1200)]]


def ask(engine: Engine, key: str, prompt: list[int]) -> None:
    run(engine, request_for(key, prompt, max_tokens=4, sampling=GREEDY, ignore_eos=True))
    settle(engine)


def prompt_of(head: int, tail: int, key: int) -> list[int]:
    """Return a prompt of `head` tokens shared with other prompts and `tail` tokens of its own. The
    first of its own tokens may equal another prompt's."""
    return [
        *HEAD[:head],
        95 + key % 3,
        *(100 + (key * 7919 + i * 104_729) % 151 for i in range(tail - 1)),
    ]


# The shared part is as often a sentence, which is not worth reading from a file, as a document.
ASKED = st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 1200)), st.integers(20, 700))


# Read speeds of a file of a scripted sequence: instantaneous; never faster than computing; faster
# only if hundreds of tokens are needed.
READ_MB_S = (1000.0, 0.0001, 0.007)
SHAPES = {
    "lines": {},
    "snapshots": {"rewind": "none", "segments": False},
    "lines with states": {"rewind": "none", "states": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=examples(40))
@given(
    starts=st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=2, max_size=4),
    read_mb_s=st.sampled_from(READ_MB_S),
)
def test_at_most_the_last_sequence_is_in_the_context_at_each_start(
    shape: str, starts: list[list[tuple[int, int]]], read_mb_s: float
) -> None:
    """This also holds if the disk is slower than computing, so that no KV is read back from it."""
    with tempfile.TemporaryDirectory() as folder:
        key = 0
        for requests in starts:
            backend = ScriptedBackend(n_ctx=4096, n_batch=64, **SHAPES[shape])  # type: ignore[arg-type]
            engine = Engine(backend, EngineSettings(disk_dir=folder, disk_bytes=10**9))
            assert engine.pool.kv.disk is not None
            engine.pool.kv.disk.reads.learn(round(read_mb_s * 1e6), 1.0)
            engine.pool.kv.speed = PrefillCost(1e-3)
            for head, tail in requests:
                key += 1
                prompt = prompt_of(head, tail, key)
                ask(engine, str(key), prompt)
                assert len(engine.pool.idle) <= 1, f"request {key} left others in the context"
                assert backend.cells_free() >= backend.info.n_ctx - len(prompt) - 4
            engine.close()


def test_a_real_models_context_is_as_empty_after_a_restart_as_before(
    few_layers: Path, tmp_path: Path
) -> None:
    """SmolLM2. In the first process one sequence shared one token more than the system prompt with
    the current prompts. That token is on disk, and no file is read for one token. The sequence that
    holds it must still leave when another one arrives."""
    system = list(range(300, 331))

    def line(first: int, key: int) -> list[int]:
        return [*system, first, *(400 + key * 90 + k for k in range(90))]

    for begun, firsts in enumerate([(2001, 2000, 2003), (2005, 2000, 2005)]):
        backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=2048, n_seq_max=6, n_batch=256))
        engine = Engine(backend, EngineSettings(disk_dir=str(tmp_path), disk_bytes=10**9))
        assert engine.pool.kv.disk is not None
        engine.pool.kv.disk.reads.learn(100_000_000, 1.0)
        for i, first in enumerate(firsts):
            ask(engine, str(i), line(first, 3 * begun + i))
        assert len(engine.pool.idle) == 1
        assert backend.cells_free() >= backend.info.n_ctx - 31 - 1 - 90 - 4
        engine.close()


@settings(max_examples=examples(40))
@given(
    starts=st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=2, max_size=3),
    cache_tokens=st.integers(50, 3000),
    shape=st.sampled_from(sorted(SHAPES)),
)
def test_evictions_end_for_any_memory_size(
    starts: list[list[tuple[int, int]]], cache_tokens: int, shape: str
) -> None:
    """Sequences that don't fit together into the cache's memory do not evict each other forever."""
    with tempfile.TemporaryDirectory() as folder:
        key = 0
        for requests in starts:
            backend = ScriptedBackend(n_ctx=8192, n_batch=64, **SHAPES[shape])  # type: ignore[arg-type]
            n_bytes = (
                len(backend.export_range(sequence := filled(backend, 100), 0, 100))
                // 100
                * cache_tokens
            )
            backend.drop(sequence)
            engine = Engine(
                backend, EngineSettings(disk_dir=folder, disk_bytes=10**9, cache_bytes=n_bytes)
            )
            for head, tail in requests:
                key += 1
                # `settle` gives up after ten thousand idle ticks.
                ask(engine, str(key), prompt_of(head, tail, key))
                assert engine.pool.cache.budget.held_bytes <= n_bytes
            engine.close()


class Clocked(ScriptedBackend):
    """A backend in which a token takes one millisecond. `before` records for each step the cells
    held before it and the tokens computed."""

    def __init__(self, **shape: object) -> None:
        super().__init__(n_ctx=8192, n_batch=64, **shape)  # type: ignore[arg-type]
        self.now, self.before = 0.0, [(0, 0)]

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        n_tokens = sum(len(c.tokens) for c in chunks)
        self.before.append((self.info.n_ctx - self.cells_free(), n_tokens))
        self.now += 0.001 * n_tokens
        return super().step(chunks)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=examples(30))
@given(asked=st.lists(st.tuples(ASKED, st.booleans()), min_size=2, max_size=6))
def test_idle_sequences_leave_the_context_before_a_prompt_is_computed(
    shape: str, asked: list[tuple[tuple[int, int], bool]]
) -> None:
    """This holds for a prompt that follows an answer at once, as an agent's does, and for one after
    a pause. Before its first step, the context holds only the KV that the prompt itself reuses."""
    backend = Clocked(**SHAPES[shape])
    engine = Engine(backend, EngineSettings(), clock=lambda: backend.now)
    for key, ((head, tail), rests) in enumerate(asked):
        backend.before.clear()
        request = request_for(
            str(key), prompt_of(head, tail, key), max_tokens=4, sampling=GREEDY, ignore_eos=True
        )
        outcome = run(engine, request)
        cached = outcome.finish(str(key)).usage.cached_tokens
        if len(prompt_tokens(engine, request)) - cached >= 128:
            assert backend.before[0][0] <= cached
        if rests:
            settle(engine)


def test_a_short_question_does_not_wait_for_copies_of_idle_sequences() -> None:
    """Idle sequences leave in parallel with its steps, one piece per step."""
    backend = Clocked()
    engine = Engine(backend, EngineSettings(), clock=lambda: backend.now)
    run(
        engine,
        request_for(
            "long", prompt_of(1200, 700, 1), max_tokens=2, sampling=GREEDY, ignore_eos=True
        ),
    )
    backend.before.clear()
    run(
        engine,
        request_for("short", prompt_of(0, 60, 2), max_tokens=20, sampling=GREEDY, ignore_eos=True),
    )
    assert backend.before[0][0] > 1000
    assert len(engine.pool.idle) == 1


def test_a_new_prompt_after_a_long_one_is_as_fast_as_alone(few_layers: Path) -> None:
    """Measured by the number of cells that llama.cpp's attention covers. Cells located before the
    prompt's own count too."""
    backend = llamacpp.load(LoadSpec(str(few_layers), n_ctx=2048, n_seq_max=4, n_batch=256))
    engine = Engine(backend, EngineSettings())
    run(
        engine,
        request_for("long", list(range(300, 1500)), max_tokens=2, sampling=GREEDY, ignore_eos=True),
    )
    held: list[int] = []
    step = backend.step

    def looked_at(chunks: Seq[Chunk]) -> object:
        held.append(backend.info.n_ctx - backend.cells_free())
        return step(chunks)

    backend.step = looked_at  # type: ignore[method-assign, assignment]
    run(
        engine,
        request_for("new", list(range(2000, 2400)), max_tokens=2, sampling=GREEDY, ignore_eos=True),
    )
    # The size of the chunks depends on the speed. No cells of other sequences are held during them.
    assert held[0] == 0
    assert held[1] <= 256
    backend.step = step  # type: ignore[method-assign]
    outcome = run(
        engine,
        request_for(
            "again", list(range(300, 1500)), max_tokens=2, sampling=GREEDY, ignore_eos=True
        ),
    )
    assert outcome.finish("again").usage.cached_tokens == 1199
    engine.close()


def filled(backend: Backend, n_tokens: int) -> int:
    sequence = backend.new_sequence()
    for at in range(0, n_tokens, 50):
        backend.step([Chunk(sequence, HEAD[at : at + 50], outputs=1)]).argmax(0)
    return sequence
