"""The length of drafts: the engine drafts only if it pays, slows no other stream, and learns what a
step costs."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.speculation.controller import (
    DraftCandidate,
    HitRates,
    choose_lengths,
    rows_of,
)
from localllm.engine.speculation.step_limits import HostTime
from localllm.engine.speculation.trials import Acceptance
from localllm.engine.step_costs import KNOTS, StepCost

RATES = st.floats(0.0, 1.0)


def powers(a: float, n: int = 16) -> list[float]:
    return [a**k for k in range(1, n + 1)]


def memory_bound(rows: int) -> float:
    """A GPU: eight rows cost as much as one."""
    return max(1.0, rows / 8)


def compute_bound(rows: int) -> float:
    return float(rows)


def test_free_verification_drafts_and_paid_verification_does_not() -> None:
    likely = DraftCandidate(powers(0.8))
    assert choose_lengths([likely], memory_bound) == [7]
    assert choose_lengths([likely], compute_bound) == [0]


def test_hopeless_guesses_are_never_drafted() -> None:
    assert choose_lengths([DraftCandidate(powers(0.02))], memory_bound) == [0]
    assert choose_lengths([DraftCandidate(())], memory_bound) == [0]
    assert choose_lengths([], memory_bound) == []


@given(st.lists(RATES, min_size=1, max_size=4), st.floats(0.0, 1.0), st.floats(0.0, 0.3))
def test_chosen_draft_lengths_slow_no_stream_and_speed_up_at_least_one(
    rates: list[float], row_cost: float, token_s: float
) -> None:
    def cost(rows: int) -> float:
        return 1.0 + row_cost * (rows - 1)

    candidates = [DraftCandidate(powers(a), token_s) for a in rates]
    lengths = choose_lengths(candidates, cost)
    if not any(lengths):
        return
    rows = len(rates) + sum(lengths)
    slower = (cost(rows) + token_s * max(lengths)) / cost(len(rates))
    speeds = [(1 + sum(c.survival[:g])) / slower for c, g in zip(candidates, lengths, strict=True)]
    assert min(speeds) >= 0.989
    assert max(speeds) > 1.0


@given(RATES, st.floats(0.0, 1.0))
def test_a_single_stream_gets_the_draft_length_with_the_highest_speed(
    rate: float, row_cost: float
) -> None:
    def cost(rows: int) -> float:
        return 1.0 + row_cost * (rows - 1)

    def speed(length: int) -> float:
        # (1 − a^(g+1))/(1 − a), written as a sum so that a = 1 needs no special case.
        return (1 + sum(powers(rate, length))) / cost(1 + length)

    (length,) = choose_lengths([DraftCandidate(powers(rate))], cost)
    best = max(range(17), key=speed)
    assert length == 0 if speed(best) <= 1.03 else speed(length) == pytest.approx(speed(best))


def test_a_copying_stream_does_not_draft_if_that_slows_another_stream() -> None:
    copying, chatting = DraftCandidate(powers(0.99)), DraftCandidate(())

    def cpu(rows: int) -> float:
        return 1.0 + 0.5 * (rows - 1)

    assert choose_lengths([copying], cpu)[0] > 4
    assert choose_lengths([copying, chatting], cpu) == [0, 0]
    assert choose_lengths([copying, copying], cpu) > [4, 4]


def test_step_cost_follows_a_machine_that_slows_down_and_keeps_its_shape() -> None:
    cost = StepCost()
    cost.set({1: 0.010, 8: 0.048, 16: 0.080})
    assert cost.seconds(1) == pytest.approx(0.010)
    assert cost.seconds(12) == pytest.approx(0.064)
    for _ in range(200):
        cost.observe(1, 0.020)
        cost.observe(8, 0.096)
    assert cost.seconds(1) == pytest.approx(0.020, rel=0.05)
    assert cost.seconds(8) / cost.seconds(1) == pytest.approx(4.8, rel=0.1)


def test_step_cost_learns_that_verifying_is_dearer_than_probed() -> None:
    cost = StepCost()
    cost.set({1: 0.010, 8: 0.012, 16: 0.014})
    assert choose_lengths([DraftCandidate(powers(0.6))], cost.seconds) != [0]
    for _ in range(60):
        cost.observe(8, 0.080)
        cost.observe(1, 0.010)
    assert cost.seconds(8) / cost.seconds(1) == pytest.approx(8, rel=0.15)


@given(st.floats(0.2, 0.7), st.floats(1.5, 4.0), st.sampled_from(KNOTS[3:]))
def test_a_probe_distorted_by_other_processes_is_soon_corrected(
    row: float, busy: float, rows: int
) -> None:
    """A step without drafts suffers most from other processes, because each of its many small parts
    waits. Drafts therefore look too cheap in the probe."""
    cost = StepCost()
    cost.set({n: 0.01 * (1 + row * (n - 1)) for n in KNOTS} | {1: 0.01 * busy})
    wrong = cost.seconds(rows) / cost.seconds(1)
    for _ in range(3):
        for _ in range(12):
            cost.observe(1, 0.01)
        for _ in range(2):
            cost.observe(rows, 0.01 * (1 + row * (rows - 1)))
    right = 1 + row * (rows - 1)
    found = cost.seconds(rows) / cost.seconds(1)
    assert abs(math.log(found / right)) <= max(0.25, 0.3 * abs(math.log(wrong / right)))
    assert cost.drifted or abs(math.log(wrong / right)) < 0.6


def test_a_single_slow_step_does_not_change_the_learned_step_cost() -> None:
    cost = StepCost()
    cost.set({n: 0.01 * (1 + 0.1 * (n - 1)) for n in KNOTS})
    before = cost.seconds(8) / cost.seconds(1)
    cost.observe(8, 10.0)
    assert cost.seconds(8) / cost.seconds(1) < before * 1.1


@given(st.dictionaries(st.sampled_from([2, 4, 8, 16, 32]), st.floats(1e-3, 1.0), min_size=1))
def test_a_plausible_probe_is_reproduced_and_no_row_is_ever_free(
    measured: dict[int, float],
) -> None:
    measured[1] = 1e-3
    cost = StepCost()
    cost.set(measured)
    rows = sorted(measured)
    if all(measured[b] >= measured[a] + 1e-5 * (b - a) for a, b in itertools.pairwise(rows)):
        for n in rows:
            assert cost.seconds(n) == pytest.approx(measured[n], rel=1e-6)
    assert all(cost.seconds(b) > cost.seconds(a) for a, b in itertools.pairwise(KNOTS))


def test_hit_rates_react_within_a_few_tokens() -> None:
    shared = HitRates()
    rates = HitRates(shared)
    before = rates.rate(5)
    for _ in range(6):
        rates.observe(5, hit=False)
    assert rates.rate(5) < before / 2
    for _ in range(12):
        rates.observe(5, hit=True)
    assert rates.rate(5) > 0.6
    # A new request starts with the rates that other requests observed.
    assert HitRates(shared).rate(5) != before


def test_survival_probabilities_fall_and_end_below_the_cost_of_a_row() -> None:
    survival = HitRates().survival(3, 64)
    assert survival == sorted(survival, reverse=True)
    assert len(survival) < 64
    assert survival[-1] >= 0.05


def test_acceptance_counts_only_verified_tokens() -> None:
    acceptance = Acceptance(Acceptance())
    for _ in range(30):
        # Two right, the third wrong: two hits and one miss. The tokens after the miss do not count.
        acceptance.observe(2, 8)
    assert acceptance.rate == pytest.approx(2 / 3, abs=0.07)
    assert acceptance.survival(3) == pytest.approx([acceptance.rate**k for k in (1, 2, 3)])


@given(st.floats(1.0, 40.0), st.floats(0.05, 0.9), st.integers(1, 4))
def test_a_drafting_step_stays_within_the_waiting_time_of_other_requests(
    most: float, row: float, n: int
) -> None:
    def cost(rows: int) -> float:
        return 1.0 + row * (rows - 1)

    free = choose_lengths([DraftCandidate(powers(0.99, 64))] * n, cost)
    bound = choose_lengths([DraftCandidate(powers(0.99, 64))] * n, cost, most)
    assert cost(n + sum(bound)) <= most * cost(n) + 1e-9
    assert sum(bound) <= sum(free)
    if cost(n + sum(free)) <= most * cost(n):
        assert bound == free


def test_slow_steps_with_drafts_do_not_make_plain_steps_look_slow() -> None:
    """Otherwise a step with drafts would be compared with a step without drafts that never took so
    long."""
    cost = StepCost()
    cost.set({1: 0.010, 4: 0.012, 8: 0.013})
    before = cost.seconds(4) / cost.seconds(1)
    for _ in range(6):
        cost.observe(8, 0.060, 4)
    assert cost.seconds(4) / cost.seconds(1) == pytest.approx(before)
    assert cost.seconds(8) > 2 * cost.seconds(4)


def test_a_draft_that_delays_the_next_step_must_pay_for_it() -> None:
    likely = DraftCandidate(powers(0.8, 2))

    def cost(rows: int) -> float:
        return 1.0 + 0.1 * (rows - 1)

    assert choose_lengths([likely], cost) == [2]
    assert choose_lengths([likely], cost, begin_s=2.0) == [0]


def test_a_padded_step_pays_for_the_longest_draft_in_every_stream() -> None:
    """Four streams, one of which can draft: 7 rows pay off and 16 rows do not. If all four can
    draft, the padding is used."""

    def cost(rows: int) -> float:
        return 1.0 + 0.003 * (rows - 4)

    one = [DraftCandidate([0.9, 0.85, 0.8]), *[DraftCandidate([])] * 3]
    assert choose_lengths(one, cost)[0] > 0
    assert choose_lengths(one, cost, padded=True) == [0, 0, 0, 0]
    every = [DraftCandidate([0.9, 0.85, 0.8])] * 4
    assert choose_lengths(every, cost, padded=True) == choose_lengths(every, cost)
    assert rows_of([3, 0, 0, 0], padded=True) == 16
    assert rows_of([3, 0, 0, 0], padded=False) == 7


@pytest.mark.parametrize("step_s", [0.002, 0.03])
def test_choosing_drafts_that_save_nothing_takes_little_time(step_s: float) -> None:
    """Measured: 0.1 ms for four streams."""
    host = HostTime()
    chosen = sum(host.allows(4, step_s) for _ in range(2000))
    assert 0.001 < chosen * 1e-4 / (2000 * step_s) < 0.003
