"""Decoding speed measured from a process's steps: only steps without drafts count, and none while
other programs used the processors."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.contention import CpuContention, of_this_process
from localllm.engine.metrics import SPANS_PER_START, DecodeSpeedTracker


class Machine:
    """A clock and other programs' CPU time, both advanced by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.others_s: float | None = 0.0

    def pace(self, cores: int = 2) -> DecodeSpeedTracker:
        return DecodeSpeedTracker(
            CpuContention(lambda: self.others_s, cores, lambda: self.now_s), lambda: self.now_s
        )

    def step(
        self, pace: DecodeSpeedTracker, depth: int, seconds: float, others: float = 0.0
    ) -> None:
        self.now_s += seconds
        if self.others_s is not None:
            self.others_s += others * seconds
        pace.observe(depth, seconds)


def test_consecutive_steps_form_spans_with_their_median_time() -> None:
    machine = Machine()
    pace = machine.pace()
    for i in range(300):
        machine.step(pace, i, 0.5 if i == 70 else 0.01)
    assert len(pace.spans) >= 4
    assert {round(span.step_s, 6) for span in pace.spans} == {0.01}, (
        "one slow step changes no median"
    )
    assert pace.spans[0].depth >= 25, "the first span read the weights in"


def test_steps_while_others_compute_do_not_count() -> None:
    machine = Machine()
    pace = machine.pace()
    for i in range(200):
        # half a core of two: a quarter of the CPU time that this process may use
        machine.step(pace, i, 0.02, others=0.5)
    assert not pace.spans
    assert pace.disturbed > 5
    for i in range(1000):
        machine.step(pace, i, 0.01, others=0.1)
    assert pace.enough


def test_without_data_on_other_programs_every_step_counts() -> None:
    machine = Machine()
    machine.others_s = None
    pace = machine.pace()
    for i in range(1000):
        machine.step(pace, i, 0.01)
    assert len(pace.spans) == SPANS_PER_START


@given(st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0, 3), st.floats(0, 2)), max_size=200))
def test_a_span_is_never_shorter_than_a_step_nor_longer_than_the_longest(
    steps: list[tuple[float, float, float]],
) -> None:
    machine = Machine()
    pace = machine.pace()
    for depth, (seconds, pause_s, others) in enumerate(steps):
        machine.now_s += pause_s
        machine.step(pace, depth, seconds, others)
    taken = [seconds for seconds, _, _ in steps]
    for span in pace.spans:
        assert min(taken) <= span.step_s <= max(taken)
        assert 0 <= span.depth < len(steps)
    assert len(pace.spans) <= SPANS_PER_START


def test_cpu_time_of_other_programs_never_decreases() -> None:
    others = of_this_process()
    first = others.mark()
    again = others.mark()
    assert others.cores >= 1
    # Ticks of a hundredth of a second are compared with a fine clock: a little may be missing.
    assert first.taken_s is None or (
        again.taken_s is not None and again.taken_s >= first.taken_s - 0.2
    )
    assert others.share(first) == 0.0, "over a moment nothing can be said"
