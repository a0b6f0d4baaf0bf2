"""On an asynchronous device, the host processes the results of step n while step n + 1 runs. The
tokens are the same as without overlap."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drive import GREEDY, Outcome, run
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.messages import Event, Finish, Generation, Request, Sampling, Text
from localllm_backends.contract import BackendFailure, Chunk
from support.emulated_device import EmulatedDevice, EmulatedResult, HostClock, Rows, Speeds
from support.examples import examples

N_VOCAB = 600
WORDS = ("and ", "é", "stop", " it", "\n", "漢", "x", "op")


def rows(seed: int, n: int = 24) -> Rows:
    rng = np.random.default_rng(seed)
    made = rng.normal(0.0, 1.0, (n, N_VOCAB)).astype(np.float32)
    made[np.arange(n)[:, None], rng.integers(0, N_VOCAB, (n, 12))] += np.linspace(
        9, 3, 12, dtype=np.float32
    )
    return made


def spell(token: int) -> bytes:
    # Tokens may also be parts of characters.
    return "".join(WORDS).encode()[token % 20 : token % 20 + 1 + token % 3]


def device(
    seed: int = 0, *, asynchronous: bool = True, top: int = 128, equals: bool = False
) -> EmulatedDevice:
    made = rows(seed).round(1) if equals else rows(seed)
    return EmulatedDevice(
        made, Speeds(), n_ctx=4000, top=top, asynchronous=asynchronous, spell=spell
    )


def engine_on(backend: EmulatedDevice) -> Engine:
    return Engine(backend, EngineSettings(headroom_bytes=0), clock=backend.clock.now)


def asked(i: int, generation: Generation) -> Request:
    return Request(f"r{i}", [10 + i, *range(40, 60)], generation)


generations = st.builds(
    Generation,
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.0]),
        top_k=st.sampled_from([0, 1, 20, 40, 300]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.1]),
        repeat_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        presence_penalty=st.sampled_from([0.0, 0.0, -0.5, 0.5]),
        logit_bias=st.sampled_from([{}, {}, {50: -100.0}, {51: 9.0}]),
        dry_multiplier=st.sampled_from([0.0, 0.0, 0.8]),
        seed=st.integers(0, 5),
    ),
    max_tokens=st.integers(1, 30),
    stop=st.sampled_from([(), (), ("stop",), ("op", "\n")]),
    stop_token_ids=st.sampled_from([(), tuple(range(0, 600, 7))]),
    logprobs=st.sampled_from([None, None, 2]),
    min_tokens=st.sampled_from([0, 0, 9]),
)


@settings(max_examples=examples(25))
@given(
    wanted=st.lists(generations, min_size=1, max_size=5),
    seed=st.integers(0, 9),
    equals=st.booleans(),
)
def test_answers_are_those_of_a_backend_that_computes_at_once_and_gives_whole_rows(
    wanted: list[Generation], seed: int, equals: bool
) -> None:
    """Tokens, text, ends and log-probabilities are the same, whether the host or the device selects
    the candidates and however steps overlap. The logits include ties."""

    def answers(backend: EmulatedDevice) -> Outcome:
        return run(engine_on(backend), *(asked(i, g) for i, g in enumerate(wanted)))

    plain = answers(device(seed, asynchronous=False, top=0, equals=equals))
    for kind in ({}, {"top": 0}, {"asynchronous": False}):
        backend = device(seed, equals=equals, **kind)  # type: ignore[arg-type]
        other = answers(backend)
        assert (other.tokens, other.text, other.logprobs) == (
            plain.tokens,
            plain.text,
            plain.logprobs,
        )
        for name in plain.ends:
            assert other.finish(name).reason == plain.finish(name).reason
            assert other.finish(name).usage == plain.finish(name).usage


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        Sampling(temperature=0.6, top_k=0, top_p=0.95, min_p=0.0),
        Sampling(temperature=1.4, top_k=0, top_p=1.0, min_p=0.1),
    ],
)
def test_draws_over_all_tokens_mostly_need_only_the_top_tokens(sampling: Sampling) -> None:
    """The device returns the total weight of all tokens. Complete rows are copied only for draws
    outside of the top tokens."""
    backend = device(top=256)
    run(
        engine_on(backend),
        *(asked(i, Generation(replace(sampling, seed=i), max_tokens=50)) for i in range(8)),
    )
    assert backend.copied_bytes < 0.15 * 8 * 50 * N_VOCAB * 4


class Watched(EmulatedDevice):
    """A device that logs when steps are submitted, when the host waits for one, and the events
    between them."""

    def __init__(self) -> None:
        super().__init__(rows(3), spell=spell)
        self.log: list[str] = []

    def step(self, chunks: Seq[Chunk]) -> EmulatedResult:
        self.log.append("ordered")
        return super().step(chunks)

    def told(self, events: list[Event]) -> None:
        self.log += ["text"] * any(isinstance(e, Text) for e in events)


def test_a_step_is_submitted_before_the_text_of_the_previous_one_is_made() -> None:
    backend = Watched()
    engine = engine_on(backend)
    for i in range(3):
        request = asked(i, Generation(GREEDY, max_tokens=20))
        engine.submit(request, list(request.prompt))
    while engine.has_work:
        backend.told(engine.step(backend.told))
    told = [i for i, what in enumerate(backend.log) if what == "text"]
    assert len(told) >= 19
    late = [i for i in told[:-2] if backend.log[i - 1] != "ordered"]
    assert late == [], "it stood between two steps"


def test_the_device_hardly_waits_for_text_conversion() -> None:
    """Making text that takes the host half of the device's time costs the device no time."""
    clock = HostClock()

    def slow(token: int) -> bytes:
        clock.waited_s += 0.01
        return b"word "

    backend = EmulatedDevice(rows(1), Speeds.flat(0.1), clock=clock, spell=slow)
    run(engine_on(backend), asked(0, Generation(GREEDY, max_tokens=40)))
    assert clock.now() < 1.02 * backend.computed_s + 0.2


def test_a_cancelled_request_receives_all_chosen_tokens() -> None:
    backend = device()
    engine = engine_on(backend)
    for i in range(2):
        request = asked(i, Generation(GREEDY, max_tokens=50))
        engine.submit(request, list(request.prompt))
    events: list[Event] = []
    for _ in range(9):
        events += engine.step()
    events += engine.cancel("r0")
    mine = [e for e in events if e.id == "r0"]
    assert isinstance(mine[-1], Finish)
    assert (
        sum(len(e.tokens) for e in mine if isinstance(e, Text)) == mine[-1].usage.completion_tokens
    )
    engine.check_integrity()
    assert run(engine, asked(7, Generation(GREEDY, max_tokens=3))).finish("r7").reason == "length"


class Breaks(EmulatedDevice):
    """A device that fails while it computes: reading the result raises the error."""

    fails = False

    def step(self, chunks: Seq[Chunk]) -> EmulatedResult:
        result = super().step(chunks)
        if self.fails:
            return Broken(self, list(chunks), [0] * len(chunks), self.done_s)
        return result


class Broken(EmulatedResult):
    def argmax(self, chunk: int) -> list[int]:
        raise BackendFailure("the device fell off the bus")


def test_a_step_that_fails_late_ends_its_requests_with_their_earlier_tokens() -> None:
    backend = Breaks(rows(2), spell=spell)
    engine = engine_on(backend)
    request = asked(0, Generation(GREEDY, max_tokens=50))
    engine.submit(request, list(request.prompt))
    outcome = Outcome()
    for _ in range(5):
        outcome.take(engine.step())
    backend.fails = True
    while engine.has_work:
        outcome.take(engine.step())
    assert "fell off" in outcome.failure("r0").message
    assert len(outcome.tokens["r0"]) == 5
    backend.fails = False
    assert run(engine, asked(1, Generation(GREEDY, max_tokens=3))).finish("r1").reason == "length"


@pytest.mark.parametrize("k", [1, 5, 40, 128])
def test_rows_with_equal_logits_are_sampled_as_from_the_complete_row(k: int) -> None:
    backend = EmulatedDevice(np.zeros((4, N_VOCAB), dtype=np.float32), spell=spell)
    whole = EmulatedDevice(np.zeros((4, N_VOCAB), dtype=np.float32), top=0, spell=spell)
    generation = Generation(replace(Sampling(), top_k=k, seed=4), max_tokens=8)
    assert (
        run(engine_on(backend), asked(0, generation)).tokens
        == run(engine_on(whole), asked(0, generation)).tokens
    )


def steps_of(engine: Engine, backend: EmulatedDevice, request: Request) -> list[float]:
    """Return the virtual seconds of each step until `request` ends."""
    engine.submit(request, list(request.prompt))
    took = []
    while engine.has_work:
        began = backend.clock.now()
        engine.step()
        took.append(backend.clock.now() - began)
    return took


@pytest.mark.parametrize("pause", [False, True])
def test_costly_idle_sequences_leave_a_device_without_long_pauses(
    pause: bool,
) -> None:
    """32,000 idle tokens of an 8B model make a step of 7 ms 4 ms longer. A new request bears this
    cost for at most one second. An emulated step includes this thread's CPU time, which varies."""

    def made() -> tuple[EmulatedDevice, Engine]:
        speeds = Speeds.flat(7e-3, kv_token_bytes=131_072, bytes_s=1e12)
        backend = EmulatedDevice(rows(1), speeds, spell=spell)
        return backend, Engine(
            backend, EngineSettings(headroom_bytes=0, cache_bytes=2**30), clock=backend.clock.now
        )

    backend, engine = made()
    alone = steps_of(engine, backend, asked(0, Generation(GREEDY, max_tokens=400)))
    backend, engine = made()
    long = Request("long", list(range(3, 500)) * 64, Generation(GREEDY, max_tokens=2))
    run(engine, long)
    if pause:
        while engine.idle():
            pass
    beside = steps_of(engine, backend, asked(0, Generation(GREEDY, max_tokens=400)))
    n = next(i for i in range(len(beside)) if sum(beside[:i]) > 1.0)
    assert sum(beside[n:]) / len(beside[n:]) <= sum(alone[n:]) / len(alone[n:]) + 0.001
    assert max(beside) <= 2 * max(alone[5:]) + 0.005, "an export stood in the way"
    again = run(engine, replace(long, id="again"))
    assert again.finish("again").usage.cached_tokens >= len(long.prompt) - 1, "what left comes back"
