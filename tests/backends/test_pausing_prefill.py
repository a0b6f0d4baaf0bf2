"""Sliced prefill gives the same result as prefill in steps, and the backend can run steps between
slices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from backends.test_conformance import LOGIT_NOISE, assert_same, feed, line
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    LoadSpec,
    NoCellsError,
    Placement,
    PrefillSlices,
)
from localllm_backends.llamacpp import backend_type as llamacpp
from localllm_backends.llamacpp.native import start_native
from localllm_backends.llamacpp.pausing_prefill import PauseTimer, PausingPrefill
from models import tiny_gguf

SHAPES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "llama": (tiny_gguf.write_llama, "f16"),
    "llama+q8_0": (tiny_gguf.write_llama, "q8_0"),
    "moe": (tiny_gguf.write_moe, "f16"),
}


@pytest.fixture(params=SHAPES)
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    write, kv = SHAPES[request.param]
    path = write(tmp_path / "model.gguf")
    spec = LoadSpec(
        str(path),
        n_ctx=4096,
        n_seq_max=4,
        n_batch=64,
        kv_type_k=kv,
        kv_type_v=kv,
        placement=Placement(gpu_layers=0),
    )  # type: ignore[arg-type]
    return llamacpp.load(spec)


def begin(backend: Backend, sequence: int, tokens: list[int]) -> PrefillSlices:
    assert backend.capabilities.sliced_prefill
    assert backend.capabilities.sliced_prefill
    return backend.slice_prefill(sequence, tokens)


def read(prefill: PrefillSlices, n_tokens: int, seconds: float = 1.0) -> int:
    """Run until all tokens are computed and return the number of slices."""
    slices = 1
    while prefill.run(seconds) < n_tokens:
        slices += 1
    return slices


def test_one_thread_computes_the_slices_and_the_steps_between_them(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each computing thread has its own OpenMP helpers. With two such threads there were more
    helpers than two processors, and a step next to a paused prompt took twice as long."""
    llama, tokens = start_native(), line(800)
    computing: list[str] = []
    real = llama.llama_decode
    other = backend.new_sequence()

    def decode(context: object, batch: object) -> int:
        computing.append(threading.current_thread().name)
        return int(real(context, batch))

    monkeypatch.setattr(llama, "llama_decode", decode)
    prefill = begin(backend, backend.new_sequence(), tokens)
    while not computing:
        prefill.run(1e-6)
    feed(backend, other, line(3, seed=2))
    read(prefill, len(tokens))
    while prefill.join():
        pass
    assert set(computing) == {"sliced-prefill"}
    computing.clear()
    feed(backend, other, line(3, seed=3))
    prefill.close()
    feed(backend, other, line(3, seed=4))
    assert set(computing) == {threading.current_thread().name}
    backend.close()


def test_a_step_that_fails_during_a_paused_prompt_does_not_end_the_prompt(
    backend: Backend,
) -> None:
    tokens = line(800)
    prefill = begin(backend, backend.new_sequence(), tokens)
    assert isinstance(prefill, PausingPrefill)
    while not prefill.paused:
        prefill.run(1e-6)

    def fails() -> int:
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        prefill.run_step(fails)
    assert read(prefill, len(tokens))
    prefill.close()
    backend.close()


@pytest.mark.parametrize("prefix", [0, 70, 600])
def test_a_prompt_computed_in_slices_continues_as_if_computed_in_steps(
    backend: Backend, prefix: int
) -> None:
    tokens = line(1300)
    stepped, apart = backend.new_sequence(), backend.new_sequence()
    feed(backend, stepped, tokens)
    if prefix:
        feed(backend, apart, tokens[:prefix])
    sliced = begin(backend, apart, tokens[prefix:])
    read(sliced, len(tokens) - prefix)
    pieces = 1
    while sliced.join():
        pieces += 1
    assert pieces > 1
    sliced.close()
    assert backend.length(apart) == len(tokens)
    # Both results contain the rounding noise of steps: only rounding may differ.
    expected, got = feed(backend, stepped, [7, 8, 9]), feed(backend, apart, [7, 8, 9])
    if backend.info.kv_type_k == "f16":
        assert_same(expected, got)
    else:
        assert np.abs(expected - got).max() <= 10 * LOGIT_NOISE
    backend.check_integrity()
    backend.close()


def test_steps_between_two_slices_are_not_affected_by_the_prompt(backend: Backend) -> None:
    tokens, story = line(800), line(40, seed=1)
    alone, run_step = backend.new_sequence(), backend.new_sequence()
    expected = [feed(backend, alone, story[: 10 * i + 10][10 * i :]) for i in range(4)]
    apart = backend.new_sequence()
    sliced = begin(backend, apart, tokens)
    got = []
    for i in range(4):
        assert sliced.run(0.0) < len(tokens), "no time is no more than a few nodes"
        got.append(feed(backend, run_step, story[: 10 * i + 10][10 * i :]))
    for a, b in zip(expected, got, strict=True):
        assert_same(a, b)
    assert read(sliced, len(tokens), seconds=0.0) > 10
    sliced.close()
    assert backend.length(apart) == 0
    backend.close()


@pytest.mark.parametrize("slices", [0, 1, 5])
def test_a_sliced_prefill_can_be_cancelled_at_any_time(backend: Backend, slices: int) -> None:
    sequence = backend.new_sequence()
    feed(backend, sequence, line(20))
    sliced = begin(backend, sequence, line(700, seed=2))
    for _ in range(slices):
        sliced.run(0.0)
    sliced.close()
    assert backend.length(sequence) == 20
    feed(backend, sequence, [5, 6])
    backend.drop(sequence)
    backend.check_integrity()
    backend.close()


@pytest.mark.parametrize("prefix", [0, 70])
def test_tokens_before_an_interrupted_micro_batch_continue_as_if_computed_in_steps(
    backend: Backend, prefix: int
) -> None:
    tokens = line(1300)
    stepped, apart = backend.new_sequence(), backend.new_sequence()
    if prefix:
        feed(backend, apart, tokens[:prefix])
    sliced = begin(backend, apart, tokens[prefix:])
    assert isinstance(sliced, PausingPrefill)
    while not sliced.run(0.0):
        pass
    sliced.run(0.0)  # a few nodes of the next micro-batch
    n = sliced.stop()
    assert 0 < n < len(tokens) - prefix
    held = sliced.memory.end(0)
    assert held == prefix + n, "the cells of the one that was ended are not taken back"
    while backend.length(apart) < prefix + n:
        assert sliced.join() == len(tokens) - backend.length(apart)
    assert sliced.join() == len(tokens) - prefix - n, "what is not computed is never appended"
    sliced.close()
    assert backend.length(apart) == prefix + n
    feed(backend, stepped, tokens[: prefix + n])
    expected, got = (
        feed(backend, stepped, tokens[prefix + n :]),
        feed(backend, apart, tokens[prefix + n :]),
    )
    assert np.abs(expected - got).max() <= LOGIT_NOISE * (
        1 if backend.info.kv_type_k == "f16" else 10
    )
    backend.check_integrity()
    backend.close()


def test_without_free_cells_a_sliced_prefill_appends_no_tokens(backend: Backend) -> None:
    sequence, other = backend.new_sequence(), backend.new_sequence()
    tokens = line(600)
    sliced = begin(backend, sequence, tokens)
    read(sliced, len(tokens))
    for _ in range(63):
        feed(backend, other, line(64))
    with pytest.raises(NoCellsError):
        sliced.join()
    sliced.close()
    assert backend.length(sequence) == 0
    backend.check_integrity()
    backend.close()


@pytest.mark.parametrize("where", ["new_context", "Batch"])
def test_any_error_in_the_prefill_thread_reaches_the_waiting_caller(
    where: str, few_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = llamacpp.load(
        LoadSpec(str(few_layers), n_ctx=1024, placement=Placement(gpu_layers=0))
    )

    def broken(*_a: object, **_k: object) -> None:
        raise ValueError("nobody foresaw this")

    monkeypatch.setattr(f"localllm_backends.llamacpp.pausing_prefill.{where}", broken)
    sequence = backend.new_sequence()
    sliced = begin(backend, sequence, line(600))
    with pytest.raises(BackendFailure, match="nobody foresaw this"):
        read(sliced, 600)
    assert sliced.stop() == 0
    sliced.close()
    assert backend.length(sequence) == 0
    backend.close()


def test_the_memory_of_a_sliced_prefill_is_known_in_advance(few_layers: Path) -> None:
    backend = llamacpp.load(
        LoadSpec(str(few_layers), n_ctx=4096, placement=Placement(gpu_layers=0))
    )
    per_token = backend.memory().kv_bytes / 4096
    sizes = [backend.sliced_prefill_bytes(n) for n in (1, 256, 257, 3000)]
    assert sizes[0] == sizes[1] < sizes[2] < sizes[3]
    assert sizes[3] - sizes[0] == pytest.approx(per_token * (3072 - 256), rel=0.01)
    backend.close()


@pytest.mark.parametrize("write", [tiny_gguf.write_sliding, tiny_gguf.write_hybrid])
def test_a_memory_stored_as_a_unit_does_not_support_slices(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    backend = llamacpp.load(LoadSpec(str(write(tmp_path / "m.gguf")), n_ctx=512))
    assert not backend.capabilities.sliced_prefill
    backend.close()


# --- pause times ----------------------------------------------------------------------------------


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stretches(
    pace: PauseTimer, clock: Clock, seconds: list[float], n_tokens: int = 100
) -> list[int]:
    """Return the stretches of a micro-batch after which it would pause."""
    pace.begin(n_tokens)
    pauses = []
    for i, spent in enumerate(seconds):
        clock.now += spent
        if pace.time_is_up():
            pauses.append(i)
            pace.until = clock.now + 10
            pace.resume()
    return pauses


def test_a_stretch_that_took_long_before_is_not_started_late() -> None:
    clock = Clock()
    pace = PauseTimer(clock)
    pace.until = 10.0
    # The first time the durations are unknown, so the pause comes after the long stretch.
    assert stretches(pace, clock, [4, 4, 9, 4]) == [2]
    pace.until = clock.now + 10
    assert stretches(pace, clock, [4, 4, 9, 4]) == [1, 2]


def test_a_larger_micro_batch_is_expected_to_take_longer() -> None:
    clock = Clock()
    pace = PauseTimer(clock)
    pace.until = 1e9
    stretches(pace, clock, [1, 2, 1], n_tokens=50)
    pace.until = clock.now + 5.5
    # 2 and then 4 s are too much; 1 and then 2 s would fit.
    assert stretches(pace, clock, [2, 4, 2], n_tokens=100) == [0]


def test_old_times_are_not_used_after_the_machine_became_slower() -> None:
    clock = Clock()
    pace = PauseTimer(clock)
    pace.until = 1e9
    stretches(pace, clock, [1, 1, 1, 1])
    pace.until = clock.now + 5.5
    # Twice as slow: after 4 s another 2 s do not fit, though another 1 s would.
    assert stretches(pace, clock, [2, 2, 2, 2]) == [1]


@pytest.mark.parametrize(("stretch_s", "coarse"), [(1.0, False), (3.0, True)])
def test_micro_batches_shrink_when_many_stretches_are_longer_than_wanted(
    stretch_s: float, coarse: bool
) -> None:
    clock = Clock()
    pace = PauseTimer(clock)
    pace.until, pace.longest_wanted_s = 1e9, 2.0
    stretches(pace, clock, [0.1, stretch_s] * 50)
    assert pace.too_coarse == coarse
    stretches(pace, clock, [0.1] * 99 + [50.0])
    assert not pace.too_coarse, "one that was disturbed is no measure"
