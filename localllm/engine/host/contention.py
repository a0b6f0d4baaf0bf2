"""What other programs take of the processors that this process may use: a neighbour's cost says nothing about this one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

# The system counts in hundredths of a second: over less than this nothing can be said.
_LEAST_S = 0.05
# CpuContention who have more than this share of the processors are felt.
MOST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: its time, and what others had had by then (None: it can't be told)."""

    at_s: float
    taken_s: float | None


@dataclass(frozen=True, slots=True)
class CpuContention:
    """`taken_s`: seconds of processor time that others have had so far, of the `cores` processors that this process may use."""

    taken_s: Callable[[], float | None]
    cores: int = 1
    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> Mark:
        """Now."""
        return Mark(self.clock(), self.taken_s())

    def share(self, since: Mark) -> float:
        """The share of the processors (0 … 1) that others had since then; 0 where it can't be told."""
        now = self.mark()
        wall_s = now.at_s - since.at_s
        if wall_s < _LEAST_S or now.taken_s is None or since.taken_s is None:
            return 0.0
        return (now.taken_s - since.taken_s) / (wall_s * self.cores)


def of_this_process() -> CpuContention:
    """Among the processors that this process may use."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]
    return CpuContention(lambda: _taken_s(allowed), len(allowed))


def _taken_s(allowed: list[int]) -> float | None:
    """Seconds of work on the processors `allowed` that were not this process's. What a hypervisor kept for others counts."""
    import psutil

    try:
        each = psutil.cpu_times(percpu=True)
        times = [each[i] for i in allowed]
    except (IndexError, OSError, RuntimeError):
        return None
    # Guests are in `user` already.
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    return sum(float(getattr(t, kind, 0.0)) for t in times for kind in kinds) - time.process_time()
