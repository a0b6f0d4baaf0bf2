"""Step times of a backend that starts the next step while the host works."""

from __future__ import annotations

import numpy as np

from engine.drive import ALONE, GREEDY, settle
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm.engine.step_timer import StepTimer
from localllm_backends.contract import Chunk
from support.emulated_device import DeviceClock, EmulatedDevice, EmulatedResult, Speeds
from support.requests import request_for

STEP_S = 0.01
HOST_S = 0.004


class StartsEarly(EmulatedDevice):
    """A device that starts each decode step at the end of the one before it, whenever the step is
    submitted."""

    def step(self, chunks: list[Chunk]) -> EmulatedResult:  # type: ignore[override]
        late_s = 0.0
        if all(len(chunk.tokens) == 1 for chunk in chunks):
            late_s = max(self.clock.now() - self.done_s, 0.0)
        self.clock.waited_s -= late_s
        result = super().step(chunks)
        self.clock.waited_s += late_s
        return result


def test_a_step_that_started_early_counts_in_full() -> None:
    clock = DeviceClock()
    rows = np.random.default_rng(1).normal(0, 3, (64, 300)).astype(np.float32)
    backend = StartsEarly(rows, Speeds.flat(STEP_S), clock=clock)
    engine = Engine(backend, EngineSettings(headroom_bytes=0), clock=clock.now, cpu=ALONE)
    settle(engine)
    request = request_for("a", "say", 60, GREEDY, ignore_eos=True)
    engine.submit(request, backend.tokenize("say"))
    while engine.has_work:
        engine.step()
        clock.waited_s += HOST_S
    assert abs(engine.speculator.cost.seconds(1) / STEP_S - 1) < 0.1
    engine.close()


def test_a_period_ends_where_the_step_before_it_ended() -> None:
    now = [0.0]
    timer = StepTimer(lambda: now[0])

    def step(host_s: float, wait_s: float) -> tuple[float, float]:
        now[0] += host_s
        timer.begin()
        now[0] += wait_s
        timer.end()
        return timer.step_s, timer.period_s

    assert step(1.0, 2.0) == (2.0, 2.0)
    assert step(1.0, 2.0) == (2.0, 3.0)
    # The time of other work is not part of a step.
    assert step(9.0, 2.0) == (2.0, 4.0)
    timer.interrupt()
    assert step(1.0, 2.0) == (2.0, 2.0)
