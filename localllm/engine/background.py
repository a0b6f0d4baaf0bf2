"""Keeps requests of low priority from slowing the others: titles, summaries, warming.

While another request runs, they take part in a step only if that makes the step little longer, by
the costs learnt on this machine. On a device whose steps read the weights for many rows at the same
cost, they decode in every step. Elsewhere they get one step in `_EVERY_STEPS`, so that they end
some day. One that gets no token for `_PATIENCE_S` has normal priority from then on, so that other
prompts can't keep it waiting without end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.engine.request import RunningRequest
from localllm.engine.request_table import RequestTable
from localllm.engine.step_costs import StepCost

# The longest step with them, in steps without them.
_MAX_SLOWDOWN = 1.15
# So few steps are slow that the 95th percentile of the other requests' gaps does not change.
_EVERY_STEPS = 25
# Low priority ends after so much time without a token. Priority -1 moves the arrival by as much.
_PATIENCE_S = 30.0


def urgent(jobs: Iterable[RunningRequest]) -> list[RunningRequest]:
    """The requests that count for the choice of a prompt to read in slices: those of normal priority,
    or all if there are none."""
    all_jobs = list(jobs)
    return [job for job in all_jobs if not job.background] or all_jobs


def park_less_urgent(table: RequestTable) -> list[RunningRequest]:
    """Park the prompt that is read in slices if it is less urgent than others. Return the requests
    whose prompts may be read in slices now. Requests that waited too long are promoted before."""
    _promote(table)
    jobs = urgent(table.running.values())
    if table.prefill.job is not None and table.prefill.job not in jobs:
        table.park(table.prefill.job)
    return jobs


def _promote(table: RequestTable) -> None:
    """Give the requests normal priority that got no token for `_PATIENCE_S`."""
    now = table.clock()
    for job in (*table.waiting.values(), *table.running.values()):
        if job.background and now - max(job.token_s, job.submitted_s) >= _PATIENCE_S:
            job.promoted = True


@dataclass
class BackgroundTurns:
    """Chooses the requests of each step. `cost` has the seconds of a step by its rows."""

    cost: StepCost
    _steps: int = 0
    _next_index: int = 0

    def choose_requests(self, ready: Sequence[RunningRequest]) -> list[RunningRequest]:
        """The requests of `ready` that take part in the next step."""
        others = [job for job in ready if not job.background]
        if not others or len(others) == len(ready):
            return list(ready)
        self._steps += 1
        if self._steps % _EVERY_STEPS == 0:
            return list(ready)
        if any(job.prefilling for job in others):
            return others
        waiting = [job for job in ready if job.background and not job.prefilling]
        rows = sum(1 + len(job.draft) for job in others)
        n_rows = self._free_rows(rows, len(waiting))
        if not n_rows:
            return others
        # Each step begins with the next of them.
        self._next_index = (self._next_index + n_rows) % len(waiting)
        rotated = [*waiting[self._next_index :], *waiting[: self._next_index]]
        return [*others, *rotated[:n_rows]]

    def _free_rows(self, rows: int, max_rows: int) -> int:
        """How many rows can be added to a step of `rows` rows at little cost."""
        limit_s = self.cost.seconds(rows) * _MAX_SLOWDOWN
        free = 0
        while free < max_rows and self.cost.seconds(rows + free + 1) <= limit_s:
            free += 1
        return free
