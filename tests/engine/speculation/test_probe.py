"""The cost of drafts is measured while no request waits, and again once the machine is idle if it
was busy."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from localllm.engine.contention import CpuContention
from localllm.engine.speculation.controller import CostProbe
from localllm.engine.step_costs import PrefillCost, StepCost
from localllm_backends.contract import Chunk
from support.scripted_backend import ScriptedBackend, ScriptedResult

PLAIN_S = 0.01


class Machine(ScriptedBackend):
    """A step takes `PLAIN_S` plus 0.4 × `PLAIN_S` for each further row. While other processes are
    busy (`beside`: their share of two processors), a step with one row takes three times as long
    and the further rows as long as before. This makes a probe wrong."""

    def __init__(self) -> None:
        super().__init__(n_ctx=1024, n_batch=64)
        self.now, self.theirs_s, self.beside, self.made = 0.0, 0.0, 0.0, 0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.theirs_s += seconds * self.beside * 2

    def step(self, chunks: Seq[Chunk]) -> ScriptedResult:
        rows = sum(len(c.tokens) for c in chunks)
        self.made += 1
        self.wait(
            PLAIN_S * (3.0 if self.beside and rows == 1 else 1.0) + PLAIN_S * 0.4 * (rows - 1)
        )
        return super().step(chunks)

    def probe(self, cost: StepCost) -> CostProbe:
        return CostProbe(
            self,
            cost,
            CpuContention(lambda: self.theirs_s, 2, lambda: self.now),
            lambda: self.now,
            PrefillCost(),
        )


def tick_all(probe: CostProbe, idle_s: float = 0.0) -> None:
    while probe.tick(idle_s):
        pass


def of_eight(cost: StepCost) -> float:
    return cost.seconds(8) / cost.seconds(1)


def test_the_probe_runs_at_once_on_a_busy_machine_and_again_when_the_machine_is_idle() -> None:
    machine, cost = Machine(), StepCost()
    machine.beside = 0.5
    probe = machine.probe(cost)
    tick_all(probe)
    assert of_eight(cost) == pytest.approx(3.8 / 3.0), "better than nothing"
    steps = machine.made
    for _ in range(10):
        machine.wait(2.0)
        tick_all(probe, idle_s=20.0)
    assert machine.made == steps, "not while they compute"
    machine.beside = 0.0
    for _ in range(4):
        machine.wait(2.0)
        tick_all(probe, idle_s=0.5)
    assert machine.made == steps, "not while somebody may ask again"
    for _ in range(3):
        machine.wait(2.0)
        tick_all(probe, idle_s=20.0)
    assert of_eight(cost) == pytest.approx(3.8)
    steps = machine.made
    for _ in range(100):
        machine.wait(2.0)
        tick_all(probe, idle_s=20.0)
    assert machine.made == steps, "what is known is not measured again"


def test_a_cost_that_always_differs_from_the_probe_is_probed_less_and_less_often() -> None:
    machine, cost = Machine(), StepCost()
    probe = machine.probe(cost)
    tick_all(probe)
    began = []
    for _ in range(500):
        cost.observe(8, PLAIN_S * 8.0)  # deep in a conversation the cost is this high
        steps = machine.made
        machine.wait(2.0)
        tick_all(probe, idle_s=20.0)
        if machine.made > steps:
            began.append(machine.now)
    assert 3 <= len(began) <= 8, began


def test_a_probe_on_a_newly_busy_machine_does_not_replace_learned_costs() -> None:
    machine, cost = Machine(), StepCost()
    probe = machine.probe(cost)
    tick_all(probe)
    for _ in range(4):
        cost.observe(8, PLAIN_S * 8.0)
    assert cost.drifted
    machine.wait(10.0)
    probe.tick(20.0)
    machine.wait(2.0)
    assert probe.tick(20.0), "quiet until now"
    machine.beside = 0.5
    tick_all(probe, idle_s=20.0)
    assert of_eight(cost) > 4.5
