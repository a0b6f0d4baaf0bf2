"""A finished line leaves the live context once it is in the cache's memory: whatever was cached before it, in this start or another.

Every token resident in a unified KV cache slows every other sequence, so a server in use for days must be as quick as a fresh
one.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, run, settle
from localllm.engine.core import Engine, EngineSettings
from localllm_backends.contract import Backend, Chunk, LoadSpec
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for
from support.scripted_backend import ScriptedBackend

HEAD = [259, *[40 + i % 50 for i in range(1200)]]


def ask(engine: Engine, key: str, prompt: list[int]) -> None:
    run(engine, request_for(key, prompt, max_tokens=4, sampling=GREEDY, ignore_eos=True))
    settle(engine)


def prompt_of(head: int, tail: int, key: int) -> list[int]:
    """`head` tokens that others begin with too, and `tail` of its own, of which the first may happen to be another's."""
    return [*HEAD[:head], 95 + key % 3, *(100 + (key * 7919 + i * 104_729) % 151 for i in range(tail - 1))]


# How much is shared is as often a sentence, which is not worth reading from a file, as a document.
ASKED = st.tuples(st.one_of(st.integers(0, 40), st.integers(0, 1200)), st.integers(20, 700))


# A file of a scripted line is read in no time; never quicker than it is computed; quicker where hundreds of tokens are wanted.
READ_MB_S = (1000.0, 0.0001, 0.007)
SHAPES = {
    "lines": {},
    "snapshots": {"rewind": "none", "segments": False},
    "lines with states": {"rewind": "none", "states": True},
}


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=2, max_size=4),
    read_mb_s=st.sampled_from(READ_MB_S),
)
def test_at_most_the_last_line_is_resident_in_every_start(
    shape: str, starts: list[list[tuple[int, int]]], read_mb_s: float
) -> None:
    """Also where the disk is slower than computing, so that nothing comes back from it."""
    with tempfile.TemporaryDirectory() as folder:
        key = 0
        for requests in starts:
            backend = ScriptedBackend(n_ctx=4096, n_batch=64, **SHAPES[shape])  # type: ignore[arg-type]
            engine = Engine(backend, EngineSettings(disk_dir=folder, disk_bytes=10**9))
            assert engine._disk is not None
            engine._disk.read_bytes_s = read_mb_s * 1e6
            engine.pool.kv.prefill_tok_s = lambda: 1000.0
            for head, tail in requests:
                key += 1
                prompt = prompt_of(head, tail, key)
                ask(engine, str(key), prompt)
                assert engine.pool.residents <= 1, f"request {key} left others in the context"
                assert backend.cells_free() >= backend.info.n_ctx - len(prompt) - 4
            engine.close()


def test_a_real_model_is_as_empty_after_a_restart_as_before(smollm2: Path, tmp_path: Path) -> None:
    """SmolLM2, after a start one of whose lines had a token more in common with what is asked now than the system prompt: that
    token is on disk, nobody reads a file for it, and the line that has it must leave all the same once another comes."""
    system = list(range(300, 331))

    def line(first: int, key: int) -> list[int]:
        return [*system, first, *(400 + key * 90 + k for k in range(90))]

    for begun, firsts in enumerate([(2001, 2000, 2003), (2005, 2000, 2005)]):
        backend = llamacpp.load(LoadSpec(str(smollm2), n_ctx=2048, n_seq_max=6, n_batch=256))
        engine = Engine(backend, EngineSettings(disk_dir=str(tmp_path), disk_bytes=10**9))
        assert engine._disk is not None
        engine._disk.read_bytes_s = 100e6
        for i, first in enumerate(firsts):
            ask(engine, str(i), line(first, 3 * begun + i))
        assert engine.pool.residents == 1
        assert backend.cells_free() >= backend.info.n_ctx - 31 - 1 - 90 - 4
        engine.close()


@settings(max_examples=40, deadline=None)
@given(
    starts=st.lists(st.lists(ASKED, min_size=1, max_size=4), min_size=2, max_size=3),
    cache_tokens=st.integers(50, 3000),
    shape=st.sampled_from(sorted(SHAPES)),
)
def test_in_a_memory_of_any_size_it_comes_to_rest(
    starts: list[list[tuple[int, int]]], cache_tokens: int, shape: str
) -> None:
    """Lines that don't fit into the cache's memory together do not take turns in it."""
    with tempfile.TemporaryDirectory() as folder:
        key = 0
        for requests in starts:
            backend = ScriptedBackend(n_ctx=8192, n_batch=64, **SHAPES[shape])  # type: ignore[arg-type]
            n_bytes = len(backend.export_range(sequence := filled(backend, 100), 0, 100)) // 100 * cache_tokens
            backend.drop(sequence)
            engine = Engine(backend, EngineSettings(disk_dir=folder, disk_bytes=10**9, cache_bytes=n_bytes))
            for head, tail in requests:
                key += 1
                # `settle` gives up after ten thousand pieces.
                ask(engine, str(key), prompt_of(head, tail, key))
                assert engine.pool.cache.budget.held_bytes <= n_bytes
            engine.close()


def filled(backend: Backend, n_tokens: int) -> int:
    sequence = backend.new_sequence()
    for at in range(0, n_tokens, 50):
        backend.step([Chunk(sequence, HEAD[at : at + 50], outputs=1)]).argmax(0)
    return sequence
