"""Measures the engine's steps: each one alone, and with the time since the end of the step before."""

from __future__ import annotations

from collections.abc import Callable

# A period is at most this many times as long as its step. A longer pause has another cause, such as
# a request that was admitted.
_LONGEST_PERIOD = 2.0


class StepTimer:
    """The time of the last step, in seconds.

    `step_s`: from its start to its last result.
    `period_s`: from the last result of the step before it. Some backends start a step early, while
    the host works on the last results. `step_s` is then less than the step's own time. Steps with
    drafts don't start early, so only periods can be compared.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_s = clock()
        self._ended_s: float | None = None
        self.step_s = 0.0
        self.period_s = 0.0

    def begin(self) -> None:
        """Record the start of a step."""
        self._began_s = self._clock()

    def end(self) -> None:
        """Record that the step's results have arrived."""
        now_s = self._clock()
        self.step_s = now_s - self._began_s
        self.period_s = self.step_s
        if self._ended_s is not None:
            self.period_s = min(now_s - self._ended_s, _LONGEST_PERIOD * self.step_s)
        self._ended_s = now_s

    def interrupt(self) -> None:
        """Record that other work was done after the last step. It does not count as a period."""
        self._ended_s = None
