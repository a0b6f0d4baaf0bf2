"""Forks on MLX share the memory of their prefix."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

from backends.mlx_lines import alone, assert_same, line, start
from engine.drive import GREEDY, Outcome
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Text
from localllm_backends.contract import Chunk
from localllm_backends.mlx import backend_type
from support.requests import request_for

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]

BLOCK_TOKENS = 256
LONG = 3000


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_fork_takes_two_blocks_and_no_cells(load: Callable[..., Any], kind: str) -> None:
    """This also holds after both have been extended, in bytes that MLX holds and in those that are
    reported."""
    import mlx.core as mx

    backend = load(n_ctx=4096, n_batch=512, kv_type_k=kind, kv_type_v=kind)
    source, _ = start(backend, line(LONG))
    gc.collect()
    free = backend.cells_free()
    reported_bytes = backend.memory().kv_bytes
    held_bytes = mx.get_active_memory()
    block_bytes = reported_bytes / LONG * BLOCK_TOKENS
    fork = backend.fork(source, LONG)
    assert backend.cells_free() == free
    backend.step([Chunk(source, [5]), Chunk(fork, [7])])
    assert backend.cells_free() == free - 2
    gc.collect()
    logits_bytes = 4 * 2 * backend.info.n_vocab * 2
    assert backend.memory().kv_bytes - reported_bytes <= 2 * block_bytes
    assert mx.get_active_memory() - held_bytes <= 2 * block_bytes + logits_bytes


def test_eight_answers_need_little_more_memory_than_one(load: Callable[..., Any]) -> None:
    import mlx.core as mx

    def answers(n: int) -> tuple[list[list[int]], int, int]:
        gc.collect()
        mx.clear_cache()
        before_bytes = mx.get_active_memory()
        # Room for one prompt and eight answers, but not for two prompts. Drafts are off: their
        # lengths depend on measured times, and their rows take memory.
        loaded = load(n_ctx=4096, n_seq_max=8, n_batch=512)
        engine = Engine(loaded, EngineSettings(draft="off"))
        mx.reset_peak_memory()
        outcome = Outcome()
        for i in range(n):
            request = request_for(
                str(i), line(LONG), max_tokens=30, sampling=GREEDY, ignore_eos=True
            )
            outcome.take(engine.submit(request, line(LONG)))
        # Prefill is sliced by time, so its number of steps varies.
        n_steps = 0
        while engine.has_work:
            events = engine.step()
            outcome.take(events)
            engine.check_integrity()
            n_steps += any(isinstance(event, Text) for event in events)
        peak_bytes = mx.get_peak_memory() - before_bytes
        engine.close()
        return [outcome.tokens[str(i)] for i in range(n)], peak_bytes, n_steps

    one, one_peak_bytes, one_steps = answers(1)
    eight, eight_peak_bytes, eight_steps = answers(8)
    assert eight == one * 8
    assert eight_peak_bytes <= 1.3 * one_peak_bytes
    assert eight_steps <= one_steps + 2, "all answers were decoded together"


@pytest.mark.parametrize("shape", ["sliding", "mla", "hybrid"])
def test_rows_with_different_prefixes_are_one_batch(load: Callable[..., Any], shape: str) -> None:
    backend = load(shape, n_ctx=8192, n_seq_max=8, n_batch=512)
    judge = load(shape, n_ctx=8192, n_batch=512)
    texts = [line(600), line(300, 1), line(90, 2)]
    sequences = [start(backend, text)[0] for text in texts]
    for source in (0, 0, 1):
        sequences.append(backend.fork(sequences[source], len(texts[source])))
        texts.append(list(texts[source]))
    sequences.append(backend.fork(sequences[3], len(texts[3])))
    texts.append(list(texts[3]))
    for i in range(3):
        chunks = []
        for k, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            text.append(5 + 11 * i + k)
            chunks.append(Chunk(sequence, text[-1:]))
        result = backend.step(chunks)
    for k, text in enumerate(texts):
        assert_same(alone(judge, text), result.logits(k)[0])


def test_memory_that_no_sequence_uses_is_freed(load: Callable[..., Any]) -> None:
    backend = load(n_ctx=4096, n_batch=512)
    source, _ = start(backend, line(LONG))
    token_bytes = backend.memory().kv_bytes / LONG
    first = backend.fork(source, 600)
    second = backend.fork(source, 500)
    backend.drop(source)
    assert backend.memory().kv_bytes <= (600 + BLOCK_TOKENS) * token_bytes
    backend.drop(first)
    result = backend.step([Chunk(second, [9])])
    assert_same(alone(load(n_ctx=4096, n_batch=512), [*line(LONG)[:500], 9]), result.logits(0)[0])
    backend.drop(second)
    assert backend.memory().kv_bytes == 0
    assert backend.cells_free() == backend.info.n_ctx
