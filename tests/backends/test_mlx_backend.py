"""MLX-specific behaviour beyond the contract: steps started early, rows that join and leave,
rewound state, no leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.mlx_lines import alone, assert_same, line, start
from localllm_backends.contract import (
    CannotRewindError,
    Chunk,
    NoCellsError,
)
from localllm_backends.mlx import backend_type
from models.tiny_mlx import Calls

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid", "mla"])
def test_a_chunk_at_great_depth_is_computed_in_pieces(
    load: Callable[..., Any], shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This limits the memory for attention scores per call. The result of such a chunk does not
    change."""
    backend, judge = load(shape, n_batch=512), load(shape, n_batch=512)
    text = line(700)
    expected = alone(judge, text)
    monkeypatch.setattr("localllm_backends.mlx.stepping.SCORES_AT_ONCE", 128 * 600)
    calls = Calls(backend)
    sequence = backend.new_sequence()
    backend.step([Chunk(sequence, text[:100], outputs=0)])
    assert calls.n == 1
    result = backend.step([Chunk(sequence, text[100:600])])
    assert calls.n >= 5
    before, result = calls.n, backend.step([Chunk(sequence, text[600:])])
    assert calls.n > before + 1
    assert_same(result.logits(0)[-1], expected)


# --- steps started early --------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["llama", "sliding", "hybrid", "recurrent"])
@pytest.mark.parametrize("n_streams", [1, 3])
def test_greedy_steps_start_early_and_discarding_one_costs_only_time(
    load: Callable[..., Any], shape: str, n_streams: int
) -> None:
    backend, judge = load(shape), load(shape)
    texts = [line(20 + 3 * i, i) for i in range(n_streams)]
    sequences = []
    for text in texts:
        sequence, result = start(backend, text)
        sequences.append(sequence)
        text.append(result.argmax(0)[0])
    calls = Calls(backend)
    for _ in range(12):
        result = backend.step([Chunk(s, t[-1:]) for s, t in zip(sequences, texts, strict=True)])
        for i, text in enumerate(texts):
            text.append(result.argmax(i)[0])
    assert calls.n <= 12 + n_streams + 1, "every step was computed once, and one more is under way"
    assert backend.stepper.ahead is not None
    # A sampled token differs from the expected greedy token.
    for text in texts:
        text[-1] = (text[-1] + 7) % 250
    result = backend.step([Chunk(s, t[-1:]) for s, t in zip(sequences, texts, strict=True)])
    for i, text in enumerate(texts):
        assert_same(alone(judge, text), result.logits(i)[0])
        assert backend.length(sequences[i]) == len(text)
    assert backend.stepper.ahead is None, "what was sampled can't be guessed"


def test_a_stream_that_ends_leaves_the_others_their_next_step(load: Callable[..., Any]) -> None:
    backend, judge = load(), load()
    texts = [line(20 + i, i) for i in range(3)]
    sequences = []
    for text in texts:
        sequence, result = start(backend, text)
        sequences.append(sequence)
        text.append(result.argmax(0)[0])
    for _ in range(4):
        result = backend.step([Chunk(s, t[-1:]) for s, t in zip(sequences, texts, strict=True)])
        for i, text in enumerate(texts):
            text.append(result.argmax(i)[0])
    assert backend.stepper.ahead is not None
    backend.drop(sequences[1])
    calls = Calls(backend)
    result = backend.step([Chunk(sequences[i], texts[i][-1:]) for i in (0, 2)])
    best = [result.argmax(i)[0] for i in range(2)]
    assert calls.n <= 1, "the step under way was used; at most the next was started"
    for i, text in enumerate((texts[0], texts[2])):
        assert int(alone(judge, text).argmax()) == best[i]


# --- any history ----------------------------------------------------------------------------------

HISTORIES = {
    "llama": {},
    "llama+q8_0": {"kv_type_k": "q8_0", "kv_type_v": "q8_0"},
    "sliding": {},
    "mla": {},
    "hybrid": {"n_rewind": 8},
    "recurrent": {"n_rewind": 8},
}
# The same with segments of a few tokens, so that short sequences have long chains of segments.
SMALL_SEGMENTS = [
    f"{setting} in segments" for setting in ("llama", "llama+q8_0", "sliding", "mla", "hybrid")
]


@pytest.mark.parametrize("moves", [60, pytest.param(160, marks=pytest.mark.long)])
@pytest.mark.parametrize("setting", [*HISTORIES, *SMALL_SEGMENTS])
def test_after_any_history_logits_are_those_of_the_tokens_held(
    load: Callable[..., Any], setting: str, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks, cuts, drops, exports, mixed steps and steps started early, in random order, compared
    with direct computation."""
    rng = random.Random(setting)
    setting, _, in_segments = setting.partition(" ")
    if in_segments:
        monkeypatch.setattr("localllm_backends.mlx.sequence_cache.COPIED_TOKENS", 3)
        monkeypatch.setattr("localllm_backends.mlx.shared_prefix.WASTED_TOKENS", 3)
    backend = load(setting.partition("+")[0], **HISTORIES[setting])
    judge = load(
        setting.partition("+")[0],
        **{k: v for k, v in HISTORIES[setting].items() if k != "n_rewind"},
    )
    assert backend.capabilities.shares_cells
    held: dict[int, list[int]] = {}
    guess: dict[int, int] = {}
    for _ in range(moves):
        what = rng.choice(["step"] * 6 + ["new", "fork", "cut", "drop", "copy"])
        some = rng.choice(list(held)) if held else None
        try:
            if what == "new" or some is None:
                held[backend.new_sequence()] = []
            elif what == "fork":
                at = len(held[some]) if rng.random() < 0.5 else rng.randint(0, len(held[some]))
                held[backend.fork(some, at)] = held[some][:at]
            elif what == "cut":
                at = max(0, len(held[some]) - rng.choice([1, 3, 8, 400]))
                backend.truncate(some, at)
                held[some] = held[some][:at]
            elif what == "drop":
                backend.drop(some)
                del held[some]
            elif what == "copy" and held[some]:
                data, n = backend.export_range(some, 0, len(held[some])), len(held[some])
                state = backend.export_state(some) if backend.capabilities.states else None
                other = backend.new_sequence()
                held[other] = []
                backend.import_range(other, data, 0, n)
                if state is not None:
                    backend.import_state(other, state, n)
                held[other] = list(held[some])
            else:
                step(backend, judge, held, guess, rng)
        except (NoCellsError, CannotRewindError):
            pass
        backend.check_integrity()
        assert {s: backend.length(s) for s in held} == {s: len(t) for s, t in held.items()}
    assert backend.cells_free() >= backend.info.n_ctx - sum(map(len, held.values()))
    for sequence in held:
        backend.drop(sequence)
    assert backend.cells_free() == backend.info.n_ctx


def step(
    backend: Any, judge: Any, held: dict[int, list[int]], guess: dict[int, int], rng: random.Random
) -> None:
    """Run one mixed step: some sequences decode (greedily or not), some verify drafts, one may
    prefill."""
    chunks = []
    for sequence, tokens in held.items():
        kind = rng.random()
        if not tokens or kind < 0.1:
            chunks.append(
                Chunk(
                    sequence,
                    line(rng.randint(1, 30), rng.randrange(10**6)),
                    outputs=rng.choice([0, 1]),
                )
            )
        elif kind < 0.2:
            chunks.append(Chunk(sequence, line(rng.randint(2, 4), rng.randrange(10**6)), outputs=4))
        elif kind < 0.9:
            greedy = guess.get(sequence) if rng.random() < 0.8 else None
            chunks.append(Chunk(sequence, [greedy if greedy is not None else rng.randint(3, 250)]))
    if not chunks or sum(len(c.tokens) for c in chunks) > backend.info.n_batch:
        return
    result = backend.step(chunks)
    for chunk in chunks:
        held[chunk.sequence] = [*held[chunk.sequence], *chunk.tokens]
    for i, chunk in enumerate(chunks):
        if chunk.outputs:
            guess[chunk.sequence] = result.argmax(i)[-1]
    if rng.random() < 0.3:
        i = rng.randrange(len(chunks))
        if chunks[i].outputs:
            assert_same(alone(judge, held[chunks[i].sequence]), result.logits(i)[-1])


def test_quantised_kv_is_smaller_and_gives_similar_logits(load: Callable[..., Any]) -> None:
    tokens = line(250)
    plain = load()
    expected = alone(plain, tokens)
    start(plain, tokens)
    for kind, most, error in (("q8_0", 0.30, 0.05), ("q4_0", 0.18, 0.5)):
        backend = load(kv_type_k=kind, kv_type_v=kind)
        row = alone(backend, tokens)
        assert np.abs(row - expected).max() <= error * np.abs(expected).max()
        assert np.abs(row - expected).max() > 0
        start(backend, tokens)
        assert backend.memory().kv_bytes <= most * plain.memory().kv_bytes
        assert backend.info.kv_type_k == kind


def test_the_wired_limit_is_left_alone(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    def refuse(_: int) -> int:
        raise AssertionError("the wired limit was set")

    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    backend = load()
    sequence, result = start(backend, line(20))
    for _ in range(5):
        result = backend.step([Chunk(sequence, result.argmax(0))])
    assert backend.length(sequence) == 25


# --- memory ---------------------------------------------------------------------------------------


def test_reported_memory_equals_the_active_memory_of_mlx(
    load: Callable[..., Any], checkpoint: Callable[[str], Path]
) -> None:
    import gc

    import mlx.core as mx

    checkpoint("llama")
    gc.collect()
    before = mx.get_active_memory()
    backend = load(n_ctx=8192)
    sequences = [start(backend, line(600 + 100 * i, i))[0] for i in range(3)]
    for _ in range(3):
        backend.step([Chunk(s, [7]) for s in sequences])
    other = backend.fork(sequences[0], 600)
    report = backend.memory()
    held = mx.get_active_memory() - before
    assert report.total_bytes - report.compute_bytes == pytest.approx(held, rel=0.02)
    assert report.kv_bytes > 0
    backend.drop(other)
    backend.close()
    gc.collect()
    assert mx.get_active_memory() - before < 0.01 * held


@pytest.mark.parametrize("requests", [400, pytest.param(1000, marks=pytest.mark.long)])
def test_hundreds_of_requests_leave_no_memory_in_use(
    load: Callable[..., Any], requests: int
) -> None:
    import gc

    import mlx.core as mx

    from engine.drive import GREEDY, settle
    from localllm.engine import EngineSettings
    from localllm.engine.core import Engine
    from support.requests import request_for

    engine = Engine(load(n_ctx=1024), EngineSettings(cache_bytes=300_000))
    rng = random.Random(0)

    def serve(n: int) -> None:
        for i in range(n):
            prompt = line(rng.choice([3, 30, 90]), rng.randrange(40))
            engine.submit(
                request_for(
                    str(i), prompt, max_tokens=rng.randint(1, 4), sampling=GREEDY, ignore_eos=True
                ),
                prompt,
            )
            engine.step()
            if rng.random() < 0.2:
                engine.cancel(str(i))
            while len(engine.jobs.running) + len(engine.jobs.waiting) > 4:
                engine.step()
        while engine.has_work:
            engine.step()
        settle(engine)
        while engine.pool.drop_one():
            pass

    serve(40)
    gc.collect()
    gc.disable()
    baseline = mx.get_active_memory()
    try:
        serve(requests)
        # Without the garbage collector: a cycle would keep a dropped sequence's buffers.
        assert mx.get_active_memory() <= 1.01 * baseline
    finally:
        gc.enable()
    engine.check_integrity()


# --- state separate from KV -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["sliding", "hybrid"])
def test_the_size_of_a_state_does_not_depend_on_the_token_count(
    load: Callable[..., Any], shape: str
) -> None:
    """The KV stored in blocks is that of the layers that keep every token."""
    backend = load(shape)
    sequence, _ = start(backend, line(200))
    few, kv = backend.state_bytes(sequence), len(backend.export_range(sequence, 0, 200))
    for i in range(6):
        backend.step([Chunk(sequence, line(60, i))])
    assert abs(backend.state_bytes(sequence) - few) < 200, "a header's figures"
    assert abs(len(backend.export_range(sequence, 200, 400)) - kv) < 200
    assert backend.state_bytes(sequence) == len(backend.export_state(sequence))


@pytest.mark.parametrize("shape", ["sliding", "hybrid"])
def test_a_state_is_exported_during_continuing_streams(
    load: Callable[..., Any], shape: str
) -> None:
    """The step that was started early for them remains valid, although it has already advanced the
    state."""
    backend, judge = load(shape), load(shape)
    texts = [line(30 + i, i) for i in range(2)]
    sequences = [start(backend, text)[0] for text in texts]
    newest = [5, 6]
    for _ in range(6):
        result = backend.step([Chunk(s, [t]) for s, t in zip(sequences, newest, strict=True)])
        for text, token in zip(texts, newest, strict=True):
            text.append(token)
        newest = [result.argmax(i)[0] for i in range(2)]
    assert backend.stepper.ahead is not None
    state, n = backend.export_state(sequences[0]), len(texts[0])
    calls = Calls(backend)
    result = backend.step([Chunk(s, [t]) for s, t in zip(sequences, newest, strict=True)])
    assert calls.n == 1, "the step behind that one: this was computed already"
    assert_same(alone(judge, [*texts[1], newest[1]]), result.logits(1)[0])
    copy = backend.fork_state(sequences[0], state, n)
    assert_same(alone(judge, [*texts[0], 9]), backend.step([Chunk(copy, [9])]).logits(0)[0])


def test_forming_a_batch_takes_one_submission_and_one_wait(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is not one wait for each layer."""
    import mlx.core as mx

    backend = load()
    sequences = [start(backend, line(20 + i, i))[0] for i in range(3)]
    waited: list[int] = []
    wait = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: (waited.append(1), wait(*arrays)))
    backend.step([Chunk(s, [5]) for s in sequences])
    assert len(waited) == 1
