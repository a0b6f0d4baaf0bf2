"""Measured memory bandwidth of this machine's CPU: several threads, arrays no cache can hold, kept with its date."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.device.types import Figure

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

MIB = 1 << 20

# Four times the last-level cache and never under 256 MiB, so that no run reads from cache; never over a twentieth of
# what is available, so that measuring never pushes a loaded machine into swap.
_CACHE_MULTIPLE, _SMALLEST_BYTES, _SHARE_OF_AVAILABLE = 4, 256 * MIB, 0.05
_SANE_GBPS = (0.5, 4000.0)
# Where other programs have more than this share of the processor, what is left of the memory is not what it gives. Such
# a figure serves until a better one, which is tried for so many times: some machines are never quiet.
_BUSY_SHARE = 0.15
_MOST_TRIES = 5


@dataclass(frozen=True, slots=True)
class Measurement:
    """Best rates (decimal GB/s) of copying (bytes read + bytes written) and of reading, with `threads` threads.
    `others_share`: of the processor's time, what other programs had meanwhile."""

    copy_gbps: float
    read_gbps: float
    threads: int
    array_bytes: int
    date: str
    others_share: float = 0.0

    @property
    def busy(self) -> bool:
        """True where other programs had so much of the machine that the figure is theirs as much as the memory's."""
        return self.others_share > _BUSY_SHARE

    @property
    def figure(self) -> Figure:
        """What a model's weights stream at: the better of the two, as both are floors of what the memory gives."""
        value = round(max(self.copy_gbps, self.read_gbps), 1)
        how = f"{self.threads} thread(s), {self.array_bytes // MIB} MiB arrays"
        beside = f", while other programs had {self.others_share:.0%} of the processor" if self.busy else ""
        return Figure(value, "measured", f"copy and read in memory, {how}, {self.date}{beside}")


def rates(*, threads: int = 0, available_bytes: int = 0, cache_bytes: int = 0, seconds: float = 1.0) -> Measurement:
    """Time copying and reading for about `seconds`; threads 0 = every core this process may use.

    Copying counts the bytes read and written (not the hidden read for ownership); reading takes the maximum of both
    arrays, the access pattern of generating a token (a vectorised reduction: BLAS would start threads of its own, and
    a float sum is bound by its additions). Each thread owns a slice, as one thread can't fill the bus; the first sweep
    touches the pages and is not counted.
    """
    from concurrent.futures import ThreadPoolExecutor  # brings logging: not what every start needs

    import numpy as np

    threads = threads or len(_affinity())
    size = array_bytes(available_bytes, cache_bytes)
    per_thread = max(size // 2 // threads // 8, 1024)
    with ThreadPoolExecutor(threads) as pool:
        slices: list[tuple[Words, Words]] = list(
            pool.map(lambda _: (np.full(per_thread, 1), np.full(per_thread, 2)), range(threads))
        )

        def sweep(kernel: Callable[[tuple[Words, Words]], Any]) -> float:
            started = time.perf_counter()
            list(pool.map(kernel, slices))
            return time.perf_counter() - started

        def copy(pair: tuple[Words, Words]) -> None:
            np.copyto(pair[1], pair[0])

        def read(pair: tuple[Words, Words]) -> None:
            np.maximum.reduce(pair[0])
            np.maximum.reduce(pair[1])

        best = {copy: float("inf"), read: float("inf")}
        for kernel in best:
            sweep(kernel)
        before = _Used.now()
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for kernel, seen in best.items():
                best[kernel] = min(seen, sweep(kernel))
        others = before.others_share(_Used.now())
    moved = 2 * 8 * per_thread * threads
    rates = {kernel: moved / taken / 1e9 for kernel, taken in best.items()}
    return Measurement(rates[copy], rates[read], threads, moved, time.strftime("%Y-%m-%d"), others)


@dataclass(frozen=True, slots=True)
class _Used:
    """Processor time so far, in seconds over all cores: of this process, of all, and what there was of it."""

    own_s: float
    all_s: float
    there_s: float

    @classmethod
    def now(cls) -> _Used:
        import psutil

        times = psutil.cpu_times()._asdict()
        # A guest's time is part of its host's `user` (proc_stat(5)).
        spent = {name: s for name, s in times.items() if not name.startswith("guest")}
        idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
        return cls(time.process_time(), sum(spent.values()) - idle, sum(spent.values()))

    def others_share(self, later: _Used) -> float:
        """Of the processor's time between this and `later`, what other programs had."""
        there = later.there_s - self.there_s
        others = (later.all_s - self.all_s) - (later.own_s - self.own_s)
        return min(max(others / there, 0.0), 1.0) if there > 0 else 0.0


def array_bytes(available_bytes: int, cache_bytes: int) -> int:
    """Bytes of all arrays together: over four times the last-level cache, within a twentieth of available memory."""
    wanted = max(_CACHE_MULTIPLE * cache_bytes, _SMALLEST_BYTES) * 2
    if available_bytes:
        wanted = min(wanted, max(int(available_bytes * _SHARE_OF_AVAILABLE), 16 * MIB))
    return wanted


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cached(folder: Path, machine: str) -> Figure | None:
    """The measurement kept for `machine` (its processor and memory), None if there is none or it is unreadable."""
    return _figure(_known(folder).get(machine))


def due(folder: Path, machine: str) -> bool:
    """True where `machine` has no measurement, or one of a busy moment that was not tried often enough to better."""
    entry = _known(folder).get(machine)
    return _figure(entry) is None or 0 < _tries(entry) < _MOST_TRIES


def keep(folder: Path, machine: str, taken: Measurement) -> Figure:
    """Remember what was `taken` for `machine`, and return it; a cache that can't be written is no error (it is measured
    again). A figure of a busy moment gives way to a higher one alone, and is never put in place of a higher one: memory is
    never faster than it is."""
    file, known, figure = _cache_file(folder), _known(folder), taken.figure
    kept, tries = _figure(known.get(machine)), _tries(known.get(machine))
    if kept is not None and kept.value > figure.value:
        if taken.busy and not tries:
            return kept
        figure = kept if tries else figure
    known[machine] = {"value": figure.value, "source": figure.source} | ({"tries": tries + 1} if taken.busy else {})
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1), encoding="utf-8")
        temporary.replace(file)
    except OSError:
        pass
    return figure


def _known(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads(_cache_file(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _figure(entry: Any) -> Figure | None:
    try:
        figure = Figure(float(entry["value"]), "measured", str(entry["source"]))
    except (ValueError, KeyError, TypeError):
        return None
    return figure if _SANE_GBPS[0] <= figure.value <= _SANE_GBPS[1] else None


def _tries(entry: object) -> int:
    """How often a machine was measured while it was busy; 0 once it was measured in quiet."""
    tries = entry.get("tries", 0) if isinstance(entry, dict) else 0
    return tries if isinstance(tries, int) else 0


def _cache_file(folder: Path) -> Path:
    return folder / "bandwidth.json"
