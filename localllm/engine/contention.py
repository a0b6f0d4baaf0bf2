"""CPU contention: what other programs take of the processors that this process may use, and decode
with fewer threads beside them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localllm_backends.contract import Backend

# The system counts in hundredths of a second: over less than this nothing can be said.
_LEAST_S = 0.05
# Others who have more than this share of the processors are felt.
MOST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: its time, and what others had had by then (None: it can't be told)."""

    at_s: float
    taken_s: float | None


@dataclass(frozen=True, slots=True)
class CpuContention:
    """`taken_s`: seconds of processor time that others have had so far, of the `cores` processors
    that this process may use."""

    taken_s: Callable[[], float | None]
    cores: int = 1
    clock: Callable[[], float] = time.perf_counter

    def mark(self) -> Mark:
        return Mark(self.clock(), self.taken_s())

    def share(self, since: Mark) -> float:
        """The share of the processors (0 … 1) that others had since then; 0 where it can't be
        told."""
        now = self.mark()
        wall_s = now.at_s - since.at_s
        if wall_s < _LEAST_S or now.taken_s is None or since.taken_s is None:
            return 0.0
        return (now.taken_s - since.taken_s) / (wall_s * self.cores)


def of_this_process() -> CpuContention:
    """Among the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
    else:
        allowed = [*range(os.cpu_count() or 1)]
    return CpuContention(lambda: _taken_s(allowed), len(allowed))


def _taken_s(allowed: list[int]) -> float | None:
    """Seconds of work on the processors `allowed` that were not this process's. What a hypervisor
    kept for others counts."""
    import psutil

    try:
        each = psutil.cpu_times(percpu=True)
        times = [each[i] for i in allowed]
    except (IndexError, OSError, RuntimeError):
        return None
    # Guests are in `user` already.
    kinds = ("user", "nice", "system", "irq", "softirq", "steal")
    busy_s = 0.0
    for kind in kinds:
        busy_s += sum(getattr(t, kind, 0.0) for t in times)
    return busy_s - time.process_time()


_LOOK_S = 0.25
# Between steps that are further apart it was idle: what others took then says little of now.
_PAUSE_S = 0.1
# A processor is left to others once they take more of it than this, and taken back when they take
# less than that.
_TAKEN = 0.6
_BACK = 0.4


@dataclass
class ThreadThrottle:
    """Tells `backends` how many threads to decode with: as many as processors that the `others`
    leave.

    The threads of a step meet behind every node of its graph, some hundred times. Where there are
    more of them than free processors each meeting waits for the system: two servers of SmolLM2 on
    two processors reached 0.24 of their speed with two threads each, 0.62 with one. Prompts meet as
    often for a hundred times the work, and take every thread."""

    backends: Sequence[Backend]
    others: CpuContention
    threads: int = field(init=False)
    _since: Mark | None = None
    _last_s: float = -math.inf

    def __post_init__(self) -> None:
        self.threads = self.others.cores

    def stepped(self, seconds: float) -> None:
        if not self.backends:
            return
        now = self.others.clock()
        paused = now - seconds - self._last_s > _PAUSE_S
        self._last_s = now
        if self._since is None or paused:
            self._since = self.others.mark()
        elif now - self._since.at_s >= _LOOK_S:
            self._use_threads(self.others.share(self._since) * self.others.cores)
            self._since = self.others.mark()

    def _use_threads(self, taken: float) -> None:
        """Others took so many processors."""
        left = self.others.cores - taken
        fewest = math.floor(left + _BACK)
        most = math.floor(left + _TAKEN)
        threads = max(1, min(max(self.threads, fewest), most, self.others.cores))
        if threads != self.threads:
            self.threads = threads
            for backend in self.backends:
                backend.use_threads(threads)
