"""Errors of an MLX backend, and the state after a failed step: tokens, forks, and foreign
blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.mlx_lines import alone, assert_same, line, start
from localllm_backends.contract import (
    BackendFailure,
    Chunk,
    NoCellsError,
    OutOfMemoryError,
    StepError,
)
from localllm_backends.mlx import backend_type
from support.examples import examples

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]


# --- failing steps --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "kind"),
    [("a kernel broke", StepError), ("[malloc] Unable to allocate 9 bytes", OutOfMemoryError)],
)
def test_a_failed_step_appends_no_tokens_and_fails_only_its_own_sequences(
    load: Callable[..., Any], message: str, kind: type[Exception]
) -> None:
    backend, judge = load(), load()
    texts = [line(20 + i, i) for i in range(3)]
    sequences = [start(backend, t)[0] for t in texts]
    free = backend.cells_free()
    real = backend.stepper.model

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(message)

    backend.stepper.model = broken
    with pytest.raises(kind):
        backend.step([Chunk(s, [5]) for s in sequences[:2]])
    backend.stepper.model = real
    assert backend.cells_free() == free
    assert [backend.length(s) for s in sequences] == [len(t) for t in texts]
    with pytest.raises(StepError, match="must be dropped"):
        backend.step([Chunk(sequences[0], [5])])
    result = backend.step([Chunk(sequences[2], [5])])
    assert_same(alone(judge, [*texts[2], 5]), result.logits(0)[0])
    for sequence in sequences[:2]:
        backend.drop(sequence)
    assert_same(alone(judge, line(9)), alone(backend, line(9)))


@pytest.mark.parametrize("n_streams", [1, 3])
def test_a_failure_during_computing_also_appends_no_tokens(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, n_streams: int
) -> None:
    """MLX computes lazily, so errors are raised when the step's results are awaited."""
    import mlx.core as mx

    backend = load()
    sequences = [start(backend, line(20 + i, i))[0] for i in range(n_streams)]
    backend.step([Chunk(s, [5]) for s in sequences])
    free, lengths = backend.cells_free(), [backend.length(s) for s in sequences]

    def broken(*_: Any) -> None:
        raise RuntimeError("a kernel broke")

    with monkeypatch.context() as patched:
        patched.setattr(mx, "eval", broken)
        with pytest.raises(StepError, match="a kernel broke"):
            backend.step([Chunk(s, [6]) for s in sequences])
    assert backend.cells_free() == free
    assert [backend.length(s) for s in sequences] == lengths
    for sequence in sequences:
        backend.drop(sequence)
    assert backend.cells_free() == backend.info.n_ctx
    start(backend, line(30))


@pytest.mark.parametrize("tokens", [[-1], [512], [5, 10**9]])
def test_a_token_outside_the_vocabulary_is_refused(
    load: Callable[..., Any], tokens: list[int]
) -> None:
    backend = load()
    sequence = backend.new_sequence()
    with pytest.raises(BackendFailure, match="token ids below"):
        backend.step([Chunk(sequence, tokens)])
    assert backend.length(sequence) == 0


def test_a_fork_that_must_copy_takes_its_cells_at_once(
    load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    def own_attention(q: Any, k: Any, v: Any, *, cache: Any, **options: Any) -> Any:
        return mx.fast.scaled_dot_product_attention(q, k, v, **options)

    # A model with its own attention, which can't be computed in parts.
    monkeypatch.setattr("mlx_lm.models.llama.scaled_dot_product_attention", own_attention)
    backend = load(n_ctx=100)
    sequence, _ = start(backend, line(60))
    with pytest.raises(NoCellsError):
        backend.fork(sequence, 60)
    other = backend.fork(sequence, 30)
    assert backend.cells_free() == 10
    backend.drop(other)
    assert backend.cells_free() == 40


# --- foreign blocks -------------------------------------------------------------------------------


def test_blocks_of_another_model_or_type_are_refused(load: Callable[..., Any]) -> None:
    backend = load()
    for other in (load("8bit"), load(kv_type_k="q8_0", kv_type_v="q8_0")):
        sequence, _ = start(other, line(20))
        data = other.export_range(sequence, 0, 20)
        target = backend.new_sequence()
        with pytest.raises(BackendFailure, match="another model"):
            backend.import_range(target, data, 0, 20)
        assert backend.length(target) == 0


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_block_with_a_damaged_header_is_refused_or_harmless(
    load: Callable[..., Any], data: st.DataObject
) -> None:
    backend = _shared(load)
    sequence, _ = start(backend, line(20))
    good = bytearray(backend.export_range(sequence, 0, 20))
    size = int.from_bytes(good[:4], "little")
    at = data.draw(st.integers(0, 3 + size))
    good[at] = data.draw(st.integers(0, 255).filter(lambda b: b != good[at]))
    target = backend.new_sequence()
    try:
        backend.import_range(target, bytes(good), 0, 20)
    except BackendFailure:
        assert backend.length(target) == 0
    else:
        assert backend.length(target) == 20
        backend.step([Chunk(target, [5])])
    backend.drop(sequence)
    backend.drop(target)


_KEPT: dict[int, Any] = {}


def _shared(load: Callable[..., Any]) -> Any:
    """Return one backend that all examples of a property share."""
    if id(load) not in _KEPT:
        _KEPT.clear()
        _KEPT[id(load)] = load()
    return _KEPT[id(load)]
