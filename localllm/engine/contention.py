"""CPU contention: measures how much processor time other programs take, and lets decode use fewer
threads meanwhile."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localllm_backends.contract import Backend

# The system counts in hundredths of a second, so shorter intervals give no useful figure.
_MIN_S = 0.05
# If other programs take more than this share of the processors, they slow us noticeably.
MAX_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in time, and the processor time that other programs had used by then (None: unknown)."""

    at_s: float
    taken_s: float | None


@dataclass(frozen=True, slots=True)
class CpuContention:
    """Measures how much processor time other programs use.

    `taken_s` returns the seconds of processor time they have used so far, on the `cores` processors
    that this process may use.
    """

    taken_s: Callable[[], float | None]
    cores: int = 1
    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> Mark:
        return Mark(self.clock(), self.taken_s())

    def share(self, since: Mark) -> float:
        """Share of the processors (0 … 1) that other programs have used since `since`; 0 if
        unknown."""
        now = self.mark()
        wall_s = now.at_s - since.at_s
        if wall_s < _MIN_S or now.taken_s is None or since.taken_s is None:
            return 0.0
        return (now.taken_s - since.taken_s) / (wall_s * self.cores)


def of_this_process() -> CpuContention:
    """Contention on the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = [*range(os.cpu_count() or 1)]
    return CpuContention(lambda: _used_by_others_s(allowed), len(allowed))


def _used_by_others_s(allowed: list[int]) -> float | None:
    """Seconds of processor time on the processors `allowed` that this process did not use. Time
    that a hypervisor took (steal) counts too."""
    import psutil

    try:
        each = psutil.cpu_times(percpu=True)
        times = [each[i] for i in allowed]
    except (IndexError, OSError, RuntimeError):
        return None
    # `user` already includes the time of guests.
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    busy_s = 0.0
    for kind in kinds:
        busy_s += sum(getattr(t, kind, 0.0) for t in times)
    return busy_s - time.process_time()


_MEASURE_S = 0.25
# After a longer gap between steps the engine was idle: the measured share is then out of date.
_PAUSE_S = 0.1
# Thresholds, in processors: give one up if other programs use more than `_YIELD_ABOVE` of it, and
# take it back if they use less than `_RETURN_BELOW`.
_YIELD_ABOVE = 0.6
_RETURN_BELOW = 0.4


@dataclass
class ThreadThrottle:
    """Sets the number of decode threads of `backends` to the number of processors that `cpu`
    leave free.

    The threads of a step synchronise after every node of its graph, some hundred times. If there
    are more threads than free processors, each synchronisation waits for the system. Two servers of
    SmolLM2 on two processors reached 0.24 of their speed with two threads each, and 0.62 with one.
    Prefill synchronises as often for a hundred times the work, so it uses every thread.
    """

    backends: Sequence[Backend]
    cpu: CpuContention
    threads: int = field(init=False)
    _since: Mark | None = None
    _last_s: float = -math.inf

    def __post_init__(self) -> None:
        self.threads = self.cpu.cores

    def stepped(self, seconds: float) -> None:
        if not self.backends:
            return
        now = self.cpu.clock()
        paused = now - seconds - self._last_s > _PAUSE_S
        self._last_s = now
        if self._since is None or paused:
            self._since = self.cpu.mark()
        elif now - self._since.at_s >= _MEASURE_S:
            self._use_threads(self.cpu.share(self._since) * self.cpu.cores)
            self._since = self.cpu.mark()

    def _use_threads(self, used_cores: float) -> None:
        """Adjust the threads to `used_cores`, the number of processors that other programs use."""
        free_cores = self.cpu.cores - used_cores
        min_threads = math.floor(free_cores + _RETURN_BELOW)
        max_threads = math.floor(free_cores + _YIELD_ABOVE)
        threads = max(1, min(max(self.threads, min_threads), max_threads, self.cpu.cores))
        if threads != self.threads:
            self.threads = threads
            for backend in self.backends:
                backend.use_threads(threads)
