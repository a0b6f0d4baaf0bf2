"""Measured memory bandwidth of this machine's CPU: several threads, arrays no cache can hold."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localllm.device.kept import FigureFile, Measurement, ProcessorTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

MIB = 1 << 20

# Four times the last-level cache and never under 256 MiB, so that no run reads from cache; never
# over a twentieth of what is available, so that measuring never pushes a loaded machine into swap.
_CACHE_MULTIPLE = 4
_SMALLEST_BYTES = 256 * MIB
_SHARE_OF_AVAILABLE = 0.05
# Measurements of machines, kept: see kept.py.
SHELF = FigureFile("bandwidth.json", sane=(0.5, 4000.0))


def rates(
    *, threads: int = 0, available_bytes: int = 0, cache_bytes: int = 0, seconds: float = 1.0
) -> Measurement:
    """GB/s that a model's weights stream at: the better of copying and reading, as both are floors of
    what the memory gives, timed for about `seconds`; threads 0 = every core this process may use.

    Copying counts the bytes read and written (not the hidden read for ownership); reading takes the
    maximum of both arrays, the access pattern of generating a token (a vectorised reduction: BLAS
    would start threads of its own, and a float sum is bound by its additions). Each thread owns a
    slice, as one thread can't fill the bus; the first sweep touches the pages and is not counted.
    """
    from concurrent.futures import ThreadPoolExecutor  # brings logging: not what every start needs

    import numpy as np

    has_affinity = hasattr(os, "sched_getaffinity")
    threads = threads or (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
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
        before = ProcessorTimes.now()
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            for kernel, seen in best.items():
                best[kernel] = min(seen, sweep(kernel))
        others = before.others_share(ProcessorTimes.now())
    moved = 2 * 8 * per_thread * threads
    how = f"copy and read in memory, {threads} thread(s), {moved // MIB} MiB arrays"
    gbps = round(moved / min(best.values()) / 1e9, 1)
    return Measurement(gbps, how, time.strftime("%Y-%m-%d"), others)


def array_bytes(available_bytes: int, cache_bytes: int) -> int:
    """Bytes of all arrays together: over four times the last-level cache, within a twentieth of
    available memory."""
    wanted = max(_CACHE_MULTIPLE * cache_bytes, _SMALLEST_BYTES) * 2
    if available_bytes:
        wanted = min(wanted, max(int(available_bytes * _SHARE_OF_AVAILABLE), 16 * MIB))
    return wanted
