"""Requests that leave during sliced prefill: the KV computed so far is kept, and no other resources
of the request remain."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.crowds import NEAR_TIE, isolated
from engine.drive import GREEDY, Outcome, run
from engine.slices import SlicedBackend, ask, engine_of, expected, finish, start, words
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Backend, LoadSpec, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from support.requests import request_for


def beside_a_stream(engine: Engine, slices: int, **wishes: object) -> Outcome:
    """Start a stream, and next to it a long prompt of which that many slices of 10 tokens are
    prefilled."""
    outcome = start(engine, ask("stream", words(5, 1), 200))
    long = request_for("long", LONG, max_tokens=8, sampling=GREEDY, ignore_eos=True, **wishes)
    outcome.take(engine.submit(long, LONG))
    while engine.snapshot()["sliced_prefill_tokens"] != 10 * slices:
        outcome.take(engine.step())
    return outcome


LONG = words(205, 2)


def again(engine: Engine, outcome: Outcome) -> int:
    """Request the long prompt again and return the number of its cached tokens."""
    outcome.take(engine.submit(ask("again", LONG), LONG))
    finish(engine, outcome)
    assert outcome.tokens["again"] == expected(LONG, 8)
    assert outcome.tokens["stream"] == expected(words(5, 1), 200)
    return outcome.finish("again").usage.cached_tokens


@pytest.mark.parametrize("slices", [2, 13, 20])
def test_the_computed_part_of_a_cancelled_prompt_is_reused(slices: int) -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, slices)
    outcome.take(engine.cancel("long"))
    assert backend.slices[0].closed
    engine.check_integrity()
    assert again(engine, outcome) == 10 * slices
    assert engine.snapshot()["prefilled_tokens"] == len(LONG) + 5


def test_a_slice_being_appended_during_a_cancel_is_appended_completely() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 20)
    while backend.slices[0].joined < 60:
        outcome.take(engine.step())
    outcome.take(engine.cancel("long"))
    assert again(engine, outcome) == len(LONG) - 1


def test_a_micro_batch_that_completes_while_computing_stops_is_kept_and_counted() -> None:
    backend = SlicedBackend()
    backend.done_at_the_stop = 10
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 5)
    outcome.take(engine.cancel("long"))
    assert engine.snapshot()["sliced_prefill_tokens"] == 60
    assert again(engine, outcome) == 60


def test_the_part_computed_within_a_requests_time_limit_is_kept() -> None:
    backend = SlicedBackend()
    now = [0.0]
    settings = EngineSettings(sliced_prefill_tokens=50, headroom_bytes=0)
    engine = Engine(backend, settings, clock=lambda: now[0])
    outcome = beside_a_stream(engine, 12, time_limit_s=60.0)
    now[0] = 61.0
    read = backend.slices[0].read + 10  # one more in the step that finds the time is up
    outcome.take(engine.step())
    assert outcome.finish("long").reason == "length"
    assert again(engine, outcome) == read


def test_the_computed_part_of_a_parked_prompt_is_reused() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 12)
    engine.jobs.park(engine.jobs.running["long"])
    finish(engine, outcome)
    assert outcome.tokens["long"] == expected(LONG, 8)
    assert engine.snapshot()["prefilled_tokens"] == len(LONG) + 5


def test_the_part_computed_before_slices_failed_is_reused() -> None:
    backend = SlicedBackend(fails_at=130)
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 13)
    finish(engine, outcome)
    assert outcome.tokens["long"] == expected(LONG, 8)
    assert engine.snapshot()["prefilled_tokens"] == len(LONG) + 5


def test_without_cells_for_the_complete_computed_part_some_of_it_is_kept() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 15)
    other = backend.new_sequence()
    backend.lines[other] = [7] * (backend.cells_free() - 70)
    backend.shared[other] = [object() for _ in backend.lines[other]]
    outcome.take(engine.cancel("long"))
    engine.check_integrity()
    assert backend.slices[0].closed
    backend.drop(other)
    assert again(engine, outcome) == 60


def test_slices_that_no_request_can_use_are_dropped() -> None:
    """If a request does not share its KV, the KV is dropped. The same applies after a failed
    step."""
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 12, cache_prompt=False)
    outcome.take(engine.cancel("long"))
    assert [(s.joined, s.closed) for s in backend.slices] == [(0, True)]
    assert again(engine, outcome) == 0
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = beside_a_stream(engine, 12)
    backend.fail_next_step = "the kernel said no"
    outcome.take(engine.step())
    assert outcome.failure("long").message == "the kernel said no"
    assert [(s.joined, s.closed) for s in backend.slices] == [(0, True)]


def test_the_part_computed_before_a_shutdown_is_available_after_a_restart(
    tmp_path: Path,
) -> None:
    settings = EngineSettings(
        sliced_prefill_tokens=50, headroom_bytes=0, disk_dir=str(tmp_path), disk_bytes=10**8
    )
    engine = Engine(SlicedBackend(), settings)
    outcome = beside_a_stream(engine, 12)
    for request_id in [*engine.jobs.running]:
        outcome.take(engine.cancel(request_id))
    engine.close()
    engine = Engine(SlicedBackend(), settings)
    usage = run(engine, ask("again", LONG)).finish("again").usage
    assert usage.cached_tokens == 120
    engine.close()


def counting(backend: Backend, what: str, stop: int) -> list[int]:
    """Return a prompt whose continuation is not changed by rounding differences of kernels."""
    return backend.tokenize(f"{what}: " + ", ".join(str(i) for i in range(1, stop)) + ",")


def test_a_real_model_continues_from_the_computed_part_of_a_cancelled_prompt(smollm2: Path) -> None:
    """The prompt is cancelled in the middle of a micro-batch. The tokens before it are cached, and
    the answer equals that of an isolated run."""
    spec = LoadSpec(
        str(smollm2), n_ctx=1024, n_seq_max=4, n_threads=1, placement=Placement(gpu_layers=0)
    )
    alone = llamacpp.load(spec)
    stream, prompt = counting(alone, "Numbers", 8), counting(alone, "Count on", 55)
    undisturbed, gaps = isolated(alone, prompt, 8)
    assert min(gaps) > NEAR_TIE
    alone.close()
    engine = Engine(llamacpp.load(spec), EngineSettings(sliced_prefill_tokens=50))
    outcome = start(engine, ask("stream", stream, 300))
    outcome.take(engine.submit(ask("long", prompt), prompt))
    while not engine.snapshot()["sliced_prefill_tokens"]:
        outcome.take(engine.step())
    outcome.take(engine.cancel("long"))
    read = engine.snapshot()["sliced_prefill_tokens"]
    assert 0 < read < len(prompt) - 1
    engine.check_integrity()
    outcome.take(engine.cancel("stream"))
    outcome.take(engine.submit(ask("again", prompt), prompt))
    finish(engine, outcome)
    assert outcome.finish("again").usage.cached_tokens == read
    assert outcome.tokens["again"] == undisturbed
    assert engine.snapshot()["prefilled_tokens"] == len(stream) + len(prompt)
    engine.close()
