"""Steps paced by a duty cycle: computing and resting times, measured with an emulated clock."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from engine.drive import GREEDY, Outcome, prompt_tokens
from localllm.engine import EngineSettings
from localllm.engine.core import Engine
from localllm_backends.contract import Chunk
from support.requests import request_for
from support.scripted_backend import ScriptedBackend, ScriptedResult

STEP_S = 0.01


class Machine(ScriptedBackend):
    """A backend whose every step takes a hundredth of a second."""

    def __init__(self) -> None:
        super().__init__(n_ctx=4096, n_batch=64)
        self.now_s = self.computed_s = self.stopped_s = 0.0

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        self.now_s += STEP_S + self.stopped_s
        self.computed_s += STEP_S
        return super().step(chunks)


class Paced:
    """An engine on that machine. It records the number and the total duration of its rests."""

    def __init__(self, power: float) -> None:
        self.machine = Machine()
        self.engine = Engine(
            self.machine, EngineSettings(power=power), clock=lambda: self.machine.now_s
        )
        self.outcome, self.rests, self.rested_s = Outcome(), 0, 0.0

    def submit(self, key: str, words: int, max_tokens: int = 20) -> None:
        request = request_for(
            key, "word " * words, max_tokens=max_tokens, sampling=GREEDY, ignore_eos=True
        )
        self.outcome.take(self.engine.submit(request, prompt_tokens(self.engine, request)))

    def turn(self) -> None:
        """Do one iteration of the worker's loop with an empty inbox."""
        if (rest_s := self.engine.idle_wait_s) > 0:
            self.rests += 1
            self.rested_s += rest_s
            self.machine.now_s += rest_s
        self.outcome.take(self.engine.step())


@pytest.mark.parametrize("power", [1.0, 0.8, 0.5, 0.1])
def test_steps_take_their_share_of_the_time(power: float) -> None:
    paced = Paced(power)
    paced.submit("a", 300)
    while paced.engine.has_work:
        paced.turn()
    steps = round(paced.machine.computed_s / STEP_S)
    assert paced.rests == (steps - 1 if power < 1 else 0)
    # The rest after the last step does not count.
    assert paced.rested_s == pytest.approx((steps - 1) * STEP_S * (1 / power - 1))
    assert paced.engine.snapshot()["power_share"] == power
    plain = Paced(1.0)
    plain.submit("a", 300)
    while plain.engine.has_work:
        plain.turn()
    assert paced.outcome.tokens == plain.outcome.tokens
    assert paced.engine.snapshot()["decode_tok_s"] == pytest.approx(
        plain.engine.snapshot()["decode_tok_s"]
    ), "what steps take is measured"


def test_a_token_is_delivered_before_the_rest_that_follows_its_step() -> None:
    paced = Paced(0.1)
    paced.submit("a", 3, max_tokens=2)
    paced.turn()
    assert (len(paced.outcome.tokens["a"]), paced.rests) == (1, 0)
    assert paced.engine.idle_wait_s == pytest.approx(9 * STEP_S)


def test_a_process_does_not_rest_for_time_when_it_was_suspended() -> None:
    paced = Paced(0.1)
    paced.submit("a", 3)
    paced.machine.stopped_s = 3600.0
    paced.turn()
    assert paced.engine.idle_wait_s < 60
