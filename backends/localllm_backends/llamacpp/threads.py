"""Threads of a step: how many are useful here, and OpenMP's idle helper threads."""

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
# A thread with this niceness gets a tenth of a normal thread's time (Linux: a factor of 1.25 per
# level).
_NICE = 10


def usable_cores(root: Path = _SYSTEM) -> int:
    """Return the number of physical performance cores that this process may use at once.

    More threads slow decode down. `root`: root of the file system.
    """
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
        # If the quota is used up in the middle of a step, the stopped threads delay all others.
        cores = min(cores, math.floor(quota + 0.5))
    return max(1, cores)


def processors() -> int:
    """Return the number of logical processors that this process may run on."""
    allowed = _allowed()
    if allowed is not None:
        return len(allowed)
    return os.cpu_count() or 1


def _allowed() -> set[int] | None:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return None


def lower_priority() -> None:
    """Lower the priority of this thread for good.

    It then gets the time that other threads on its processors leave. Linux sets the priority per
    thread, and only an administrator can raise it again. No effect on other systems.
    """
    if sys.platform != "linux":
        return
    if os.getloadavg()[0] > processors() + 1:
        # On a fully loaded machine an idle-priority thread would never finish.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    else:
        # The scheduler counts its processor as idle. So it does not put two threads of a step on
        # another processor together.
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def cpu_quota(root: Path = _SYSTEM) -> float | None:
    """Return this process's CPU limit in processors, from the tightest control group; None if
    unlimited."""
    limits = []
    for folder in _groups(root):
        limit = _limit(folder)
        if limit is not None:
            limits.append(limit)
    return min(limits, default=None)


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's control groups, in both versions of the interface."""
    folders = []
    for line in _words(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # In a container, its own group is at the base, whatever name the host uses.
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
    except ValueError:  # "max", or no such file
        return None
    if quota > 0 and period > 0:
        return quota / period
    return None


def _performance_cores(root: Path, allowed: set[int] | None) -> int | None:
    """Return the number of fast physical cores (Linux, Intel's hybrids); None if all are alike."""
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


# On Linux ggml uses GNU's OpenMP, which keeps helper threads for every thread that computes. If all
# callers together have more helpers than there are processors, libgomp's threads hardly spin at a
# barrier before they sleep (libgomp/config/linux/wait.h: `gomp_throttled_spin_count_var`), and a
# step has hundreds of barriers. With two idle threads of a second caller on two processors, a
# decode step of SmolLM2 took 18.7 ms and slept 680 times. Without them it took 12.4 ms and never
# slept. omp_pause_soft, OpenMP 5.0, section 2.11.8: released threads are created again in the next
# parallel region.
_SOFT = 1


def release_helpers(n_threads: int) -> None:
    """Release this thread's OpenMP helpers if two callers of `n_threads` exceed the processors.

    They are created again (about 0.1 ms) by the next computation. Call it outside of computations.
    No effect without GNU's OpenMP.
    """
    library = libgomp()
    if library is not None and 2 * n_threads > processors():
        library.omp_pause_resource_all(_SOFT)


@cache
def libgomp() -> Any:
    """Return the libgomp that ggml's CPU backend is linked with, if that backend is loaded.

    It is found through that backend, since other packages load copies of their own.
    """
    for _, _, file in mappings():
        if "/libggml-cpu" in file and Path(file).exists():
            library = ctypes.CDLL(file)
            return library if hasattr(library, "omp_pause_resource_all") else None
    return None
