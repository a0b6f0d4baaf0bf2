"""Threads of a step: how many are worth it here, and OpenMP's idle helpers."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

from localllm_backends.llamacpp.native import mappings

_SYSTEM = Path("/")
# A tenth of what a thread of usual niceness gets beside it (Linux: each is 1.25 times less).
_NICE = 10


def usable_cores(root: Path = _SYSTEM) -> int:
    """Physical performance cores that this process may use at the same time; more threads than that
    slow decode down.
    `root`: where the system's own files begin."""
    import psutil

    cores = processors()
    physical = psutil.cpu_count(logical=False)
    if physical is not None:
        cores = min(cores, physical)
    fast = _performance_cores(root, _allowed())
    if fast is not None:
        cores = min(cores, fast)
    quota = cpu_quota(root)
    if quota is not None:
        # Threads that are stopped in the middle of a step, its quota spent, hold up all others.
        cores = min(cores, math.floor(quota + 0.5))
    return max(1, cores)


def processors() -> int:
    """Logical processors that this process may run on."""
    allowed = _allowed()
    if allowed is not None:
        return len(allowed)
    return os.cpu_count() or 1


def _allowed() -> set[int] | None:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return None


def lower_priority() -> None:
    """Let this thread have what other threads of the same processors leave, from now on: Linux
    counts that by thread, and only its administrator may take it back. Elsewhere nothing is
    changed."""
    if sys.platform != "linux":
        return
    if os.getloadavg()[0] > processors() + 1:
        # Where others leave nothing it would never come to its end.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    else:
        # Its processor counts as idle for others, so two threads of a step aren't put on the other
        # one together.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def cpu_quota(root: Path = _SYSTEM) -> float | None:
    """Processors' worth of time that the tightest control group around this process gives it; None
    where none limits it."""
    limits = []
    for folder in _groups(root):
        limit = _limit(folder)
        if limit is not None:
            limits.append(limit)
    return min(limits, default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of the control groups around this process, in both versions of the interface."""
    folders = []
    for line in _words(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container its own group stands at the base, whatever the host calls it.
        inner = [part for part in path.split("/") if part and part != ".."]
        folders += [base.joinpath(*inner[:n]) for n in range(len(inner) + 1)]
    return folders


def _limit(folder: Path) -> float | None:
    found = _words(folder / "cpu.max") or [
        *_words(folder / "cpu.cfs_quota_us"),
        *_words(folder / "cpu.cfs_period_us"),
    ]
    try:
        quota, period = (int(word) for word in found)
    except ValueError:  # "max", or not there
        return None
    if quota > 0 and period > 0:
        return quota / period
    return None


def _performance_cores(root: Path, allowed: set[int] | None) -> int | None:
    """Physical cores of the fast kind (Linux, Intel's hybrids); None where all are alike."""
    words = _words(root / "sys/devices/cpu_core/cpus")
    if not words:
        return None
    fast = _numbers(words[0])
    if allowed is not None:
        fast &= allowed
    cores: set[object] = set()
    for n in fast:
        topology = root / f"sys/devices/system/cpu/cpu{n}/topology"
        siblings = _words(topology / "thread_siblings_list")
        cores.add(tuple(siblings) or n)
    return len(cores) or None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except OSError:
        return []


def _numbers(ranges: str) -> set[int]:
    found: set[int] = set()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


# ggml computes with GNU's OpenMP on Linux, where every thread that computes keeps helpers. Once
# those of all callers are more than the processors, libgomp's threads hardly look at a barrier
# before they sleep at it (libgomp/config/linux/wait.h: `gomp_throttled_spin_count_var`), and a step
# has hundreds: with a second caller's two threads at rest on two processors a decode step of
# SmolLM2 took 18.7 ms and slept 680 times, without them 12.4 ms and never. omp_pause_soft, OpenMP
# 5.0, section 2.11.8: what is given up comes back with the next parallel region.
_SOFT = 1


def release_helpers(n_threads: int) -> None:
    """Let go of the helpers this thread computes with, if two callers of `n_threads` each are more
    threads than processors; they are made anew (some 0.1 ms) when it computes next. Call it outside
    of any computation. Does nothing where another library than GNU's is used, or none."""
    library = libgomp()
    if library is not None and 2 * n_threads > processors():
        library.omp_pause_resource_all(_SOFT)


@cache
def libgomp() -> Any:
    """The one ggml's CPU backend is linked with, once that is loaded: asked through it, since other
    packages bring copies of their own into this process."""
    for _, _, file in mappings():
        if "/libggml-cpu" in file and Path(file).exists():
            library = ctypes.CDLL(file)
            return library if hasattr(library, "omp_pause_resource_all") else None
    return None
