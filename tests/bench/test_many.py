"""The simulation of a pool obeys what any pool does: nothing is known that was never read, and one box leaves no choice."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.many import Costs, Machine, life, measured, simulate
from support.examples import examples

COSTS = Costs(5000.0, ((1, 0.01), (4, 0.02)))


@given(st.integers(1, 6), st.integers(1, 30), st.sampled_from(["prefix", "round robin"]), st.integers(0, 99))
@settings(max_examples=examples(25))
def test_nothing_is_known_that_was_never_read(boxes: int, people: int, route: str, seed: int) -> None:
    found = simulate(COSTS, boxes, people, route=route, seconds=600, cache_tokens=10**9, seed=seed)
    assert 0 <= found.cached <= found.prompt
    # A shared text that is being read for the first time elsewhere is known to nobody yet, and counted as if it were.
    assert found.cached <= found.known + 9000 * 10
    assert all(t > 0 for t in found.ttft_s)
    assert found.turns <= len(found.ttft_s)


def test_one_box_leaves_no_choice_and_many_reward_the_prefix() -> None:
    def run(boxes: int, route: str) -> tuple[float, float]:
        o = simulate(COSTS, boxes, 40, route=route, seconds=900, cache_tokens=10**9)
        return o.cached / o.prompt, sum(o.ttft_s) / len(o.ttft_s)

    assert run(1, "prefix") == run(1, "round robin")
    (prefix, waits), (robin, robin_waits) = run(8, "prefix"), run(8, "round robin")
    assert prefix > robin + 0.1
    assert waits < robin_waits


def test_the_same_seed_is_the_same_day() -> None:
    first, again = (next(life(3, 7)) for _ in range(2))
    assert astuple(first[1]) == astuple(again[1])
    assert first[0] == again[0]


def test_what_is_remembered_stays_within_its_budget() -> None:
    machine = Machine(COSTS, 1000)
    for i in range(50):
        machine.remember(bytes([i]), 30 + i)
        assert machine.held == sum(machine.kept.values()) <= 1000


def test_steps_between_measured_ones_lie_between_them() -> None:
    assert COSTS.step_s(1) == 0.01
    assert 0.01 < COSTS.step_s(2) < COSTS.step_s(4) == 0.02 < COSTS.step_s(16)


def test_costs_are_read_from_what_bench_printed(tmp_path: Path) -> None:
    full = {"depths": [{"prefill_tok_s": 100.0}], "streams": [{"streams": 4, "together_tok_s": 80.0}]}
    file = tmp_path / "full.json"
    file.write_text(json.dumps({"full": full}))
    assert measured(file) == Costs(100.0, ((4, 0.05),))
