"""Long prompts are prefilled in slices next to running streams: which prompts are, which requests
wait meanwhile, and that answers do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.crowds import NEAR_TIE, isolated
from engine.drive import ALONE, Outcome, run, settle
from engine.slices import MB, SlicedBackend, ask, engine_of, expected, finish, start, words
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Event, Prefill, Text
from localllm_backends.contract import LoadSpec, Placement
from localllm_backends.llamacpp import backend_type as llamacpp
from models import tiny_gguf


def test_a_long_prompt_runs_in_slices_and_a_concurrent_stream_gets_a_token_per_slice() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 100))
    outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
    before = len(outcome.tokens["stream"])
    while "long" not in outcome.tokens:
        outcome.take(engine.step())
    (sliced,) = backend.slices
    assert sliced.closed
    assert sliced.tokens == words(205, 2)[:-1]
    # One step started it. Each slice, except those of the last pieces, was followed by a step with
    # the stream's token.
    assert len(outcome.tokens["stream"]) - before >= len(sliced.slices)
    prefills = [n for step in backend.steps for _, n in step if n > 1]
    assert sum(prefills) == 5, "nothing else of it was prefilled in steps"
    finish(engine, outcome)
    assert outcome.tokens["long"] == expected(words(205, 2), 8)
    assert outcome.tokens["stream"] == expected(words(5, 1), 100)
    assert engine.snapshot()["sliced_prefill_tokens"] == 204
    assert engine.snapshot()["prefilled_tokens"] == 204 + 5 + 1


@pytest.mark.parametrize(
    ("stream", "tokens"),
    [(False, 205), (True, 50)],
    ids=["nobody decodes", "the prompt is not long"],
)
def test_a_short_prompt_or_one_without_a_stream_runs_in_steps(stream: bool, tokens: int) -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 30)) if stream else Outcome()
    outcome.take(engine.submit(ask("other", words(tokens, 2)), words(tokens, 2)))
    finish(engine, outcome)
    assert not backend.slices
    assert outcome.tokens["other"] == expected(words(tokens, 2), 8)


@pytest.mark.parametrize(
    "fault",
    [{"refuses": True}, {"fails_at": 0}, {"fails_at": 30}],
    ids=["refused", "fails at once", "fails later"],
)
def test_a_prompt_that_cannot_run_in_slices_runs_in_steps(fault: dict[str, Any]) -> None:
    backend = SlicedBackend(**fault)
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 60))
    outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
    finish(engine, outcome)
    assert len(backend.slices) <= 1, "it is not tried again"
    assert all(a.closed for a in backend.slices)
    assert outcome.tokens["long"] == expected(words(205, 2), 8)
    assert outcome.tokens["stream"] == expected(words(5, 1), 60)


def test_without_enough_memory_no_prompt_runs_in_slices() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend, available=100 * MB + 204 * MB)
    outcome = start(engine, ask("stream", words(5, 1), 60))
    outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
    finish(engine, outcome)
    assert not backend.slices
    assert outcome.tokens["long"] == expected(words(205, 2), 8)


def test_a_short_prompt_does_not_wait_for_the_long_one_nor_starve_it() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 300))
    outcome.take(engine.submit(ask("long", words(505, 2)), words(505, 2)))
    outcome.take(engine.step())
    outcome.take(engine.step())
    (sliced,) = backend.slices
    # A new short prompt every step: each gets its answer soon, and the long one gets every second
    # slice.
    slices = []
    for i in range(40):
        outcome.take(engine.submit(ask(f"short{i}", words(9, 3 + i), 1), words(9, 3 + i)))
        outcome.take(engine.step())
        slices.append(len(sliced.slices))
    assert 15 <= slices[-1] - slices[0] <= 25
    assert sum(f"short{i}" in outcome.ends for i in range(40)) >= 30
    finish(engine, outcome)
    assert outcome.tokens["long"] == expected(words(505, 2), 8)
    for i in range(40):
        assert outcome.tokens[f"short{i}"] == expected(words(9, 3 + i), 1)


def test_a_step_holds_a_slice_or_a_chunk_never_both() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 300))
    outcome.take(engine.submit(ask("long", words(405, 2)), words(405, 2)))
    outcome.take(engine.step())
    (sliced,) = backend.slices
    outcome.take(engine.submit(ask("short", words(45, 3)), words(45, 3)))
    while "short" not in outcome.tokens:
        ran, steps = len(sliced.slices), len(backend.steps)
        outcome.take(engine.step())
        chunk = any(n > 1 for step in backend.steps[steps:] for _, n in step)
        assert not (chunk and len(sliced.slices) > ran)
    finish(engine, outcome)


def test_two_long_prompts_are_read_one_after_the_other() -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 300))
    for key, seed in (("first", 2), ("second", 3)):
        outcome.take(engine.submit(ask(key, words(205, seed)), words(205, seed)))
    finish(engine, outcome)
    first, second = backend.slices
    assert (first.tokens, second.tokens) == (words(205, 2)[:-1], words(205, 3)[:-1])
    assert outcome.tokens["second"] == expected(words(205, 3), 8)


def behind_a_huge_one(n: int, read: int) -> tuple[SlicedBackend, Engine, Outcome]:
    """Set up a stream, a prompt of 1,505 tokens of which `read` are prefilled in slices, and a
    newcomer with `n` tokens. The clock stands still, so chunks fill the batch of 32 next to the
    stream's token."""
    backend = SlicedBackend(n_ctx=4096)
    settings = EngineSettings(sliced_prefill_tokens=50, headroom_bytes=0)
    engine = Engine(backend, settings, clock=lambda: 0.0)
    outcome = start(engine, ask("stream", words(5, 1), 500))
    outcome.take(engine.submit(ask("huge", words(1505, 2)), words(1505, 2)))
    while engine.snapshot()["sliced_prefill_tokens"] < read:
        outcome.take(engine.step())
    outcome.take(engine.submit(ask("new", words(n, 3)), words(n, 3)))
    return backend, engine, outcome


@pytest.mark.parametrize(("n", "read"), [(60, 10), (200, 10), (600, 10), (60, 1300)])
def test_a_much_shorter_prompt_waits_only_as_long_as_its_own_prefill_takes(
    n: int, read: int
) -> None:
    backend, engine, outcome = behind_a_huge_one(n, read)
    (sliced,) = backend.slices
    before = len(sliced.slices)
    while "new" not in outcome.tokens:
        outcome.take(engine.step())
    # Every second turn belongs to the newcomer and prefills 31 of its tokens. The huge prompt
    # continues in the other turns.
    assert abs(len(sliced.slices) - before - n / 31) <= 1
    finish(engine, outcome)
    assert len(backend.slices) == 1
    assert outcome.tokens["new"] == expected(words(n, 3), 8)
    assert outcome.tokens["huge"] == expected(words(1505, 2), 8)


@pytest.mark.parametrize(("n", "read"), [(780, 10), (1505, 10), (120, 1300)])
def test_a_prompt_of_at_least_half_the_length_waits_for_the_first(n: int, read: int) -> None:
    backend, engine, outcome = behind_a_huge_one(n, read)
    steps = len(backend.steps)
    while not backend.slices[0].closed:
        outcome.take(engine.step())
    assert {n_tokens for step in backend.steps[steps:-1] for _, n_tokens in step} == {1}
    finish(engine, outcome)
    assert backend.slices[1].tokens == words(n, 3)[:-1]
    assert outcome.tokens["new"] == expected(words(n, 3), 8)


@pytest.mark.parametrize("steps", [1, 4, 15, 22, 24])
def test_a_cancelled_sliced_prompt_leaves_no_state(steps: int) -> None:
    backend = SlicedBackend()
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 80))
    outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
    for _ in range(steps):
        outcome.take(engine.step())
    outcome.take(engine.cancel("long"))
    assert all(a.closed for a in backend.slices)
    finish(engine, outcome)
    assert outcome.tokens["stream"] == expected(words(5, 1), 80)
    again = run(engine, ask("again", words(205, 2)))
    assert again.tokens["again"] == expected(words(205, 2), 8)


def test_progress_is_reported_during_a_sliced_prefill() -> None:
    backend = SlicedBackend()
    now = [0.0]

    def clock() -> float:
        now[0] += 0.2
        return now[0]

    engine = Engine(
        backend, EngineSettings(sliced_prefill_tokens=50, headroom_bytes=0), clock=clock
    )
    outcome = start(engine, ask("stream", words(5, 1), 100))
    events: list[Event] = engine.submit(ask("long", words(205, 2)), words(205, 2))
    while not any(isinstance(e, Text) and e.id == "long" for e in events):
        events += engine.step()
    told = [e.done for e in events if isinstance(e, Prefill) and e.id == "long"]
    assert told == sorted(told)
    assert len(set(told)) > 5
    outcome.take(events)
    finish(engine, outcome)


def test_parking_a_sliced_prompt_only_delays_it() -> None:
    backend = SlicedBackend(n_ctx=400)
    engine = engine_of(backend)
    outcome = start(engine, ask("stream", words(5, 1), 380))
    while len(outcome.tokens["stream"]) < 60:
        outcome.take(engine.step())
    outcome.take(engine.submit(ask("long", words(200, 2)), words(200, 2)))
    finish(engine, outcome)
    assert outcome.tokens["stream"] == expected(words(5, 1), 380)
    assert outcome.tokens["long"] == expected(words(200, 2), 8)


@pytest.mark.usefixtures("all_threads")
@pytest.mark.parametrize("write", [tiny_gguf.write_llama, tiny_gguf.write_moe])
def test_real_prompts_read_in_slices_get_the_answers_they_get_alone(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    spec = LoadSpec(
        str(write(tmp_path / "m.gguf")),
        n_ctx=4096,
        n_seq_max=4,
        n_batch=64,
        placement=Placement(gpu_layers=0),
    )
    alone = llamacpp.load(spec)
    engine = Engine(llamacpp.load(spec), EngineSettings(sliced_prefill_tokens=50))
    outcome = start(engine, ask("stream", words(30, 1), 400))
    prompts = {f"long{i}": words(300 + 250 * i, 5 + i) for i in range(3)}
    for key, prompt in prompts.items():
        outcome.take(engine.submit(ask(key, prompt, 12), prompt))
    finish(engine, outcome)
    assert engine.snapshot()["sliced_prefill_tokens"] == sum(len(p) - 1 for p in prompts.values())
    for key, prompt in prompts.items():
        tokens, gaps = isolated(alone, prompt, 12)
        at = next(
            (j for j, (a, b) in enumerate(zip(outcome.tokens[key], tokens, strict=True)) if a != b),
            None,
        )
        assert at is None or gaps[at] <= NEAR_TIE or write is tiny_gguf.write_moe
    engine.close()
    alone.close()


def test_streams_do_not_draft_between_two_slices() -> None:
    backend = SlicedBackend()
    settings = EngineSettings(sliced_prefill_tokens=50, headroom_bytes=0, draft="ngram")
    # Steps of 10 ms. With steps of microseconds there would be no time to choose drafts.
    engine = Engine(backend, settings, clock=lambda: 0.01 * len(backend.steps), cpu=ALONE)
    told = expected(words(5, 1), 200)
    stream = ask("stream", words(5, 1), 200, prediction=backend.detokenize(told))
    outcome = start(engine, stream)
    for _ in range(10):
        outcome.take(engine.step())
    assert max(n for step in backend.steps[-8:] for _, n in step) > 1, "it drafts while it is alone"
    outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
    outcome.take(engine.step())
    first = len(backend.steps)
    while engine.prefill.job is not None:
        outcome.take(engine.step())
    assert len(backend.steps) > first + 10
    assert all(n == 1 for step in backend.steps[first:-1] for _, n in step)
    finish(engine, outcome)
    assert outcome.tokens["stream"] == told


def test_a_gap_in_a_cached_prefix_is_computed_between_the_slices_of_another() -> None:
    """A request whose cached prefix has a gap has the same priority as any short request: it does
    not wait for a long prompt."""
    backend = SlicedBackend()
    engine = engine_of(backend)
    head, known = words(24, 9), words(30, 5)
    for key, rest in (("first", words(25, 4)), ("second", known)):
        run(engine, ask(key, head + rest))
        settle(engine)
    engine.pool.kv.lost(engine.pool.cache.peek(head).parts[0].block)
    outcome = start(engine, ask("stream", words(5, 1), 400))
    outcome.take(engine.submit(ask("long", words(900, 2)), words(900, 2)))
    for _ in range(3):
        outcome.take(engine.step())
    (sliced,) = backend.slices
    prompt = [*head, *known, 7]
    outcome.take(engine.submit(ask("gap", prompt), prompt))
    while "gap" not in outcome.tokens:
        outcome.take(engine.step())
    assert not sliced.closed, "it did not wait for the end of the long one"
    finish(engine, outcome)
    assert outcome.finish("gap").usage.cached_tokens >= len(known) - 1
    assert outcome.tokens["gap"] == expected(prompt, 8)
    assert outcome.tokens["long"] == expected(words(900, 2), 8)


def test_computed_pieces_are_appended_for_the_time_of_one_slice() -> None:
    """Pieces are small. Between two steps several are joined if they are fast, and one if they are
    slow."""
    steps = []
    for piece_s in (0.0, 1.0):
        backend, now = SlicedBackend(), [0.0]
        engine = engine_of(backend, clock=lambda: now[0])  # noqa: B023
        outcome = start(engine, ask("stream", words(5, 1), 200))
        outcome.take(engine.submit(ask("long", words(205, 2)), words(205, 2)))
        outcome.take(engine.step())
        (sliced,) = backend.slices
        join = sliced.join

        def slow() -> int:
            now[0] += piece_s  # noqa: B023
            return join()  # noqa: B023

        sliced.join = slow  # type: ignore[method-assign]
        while not sliced.joined:
            outcome.take(engine.step())
        before = len(outcome.tokens["stream"])
        while not sliced.closed:
            outcome.take(engine.step())
        steps.append(len(outcome.tokens["stream"]) - before)
        finish(engine, outcome)
        assert outcome.tokens["long"] == expected(words(205, 2), 8)
    assert steps[0] <= 1
    assert steps[1] >= 8
