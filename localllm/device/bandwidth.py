"""Measure the memory bandwidth of the CPU with several threads and arrays larger than any cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from localllm.device.measurement_store import FigureFile, Measurement, ProcessorTimes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.int64]

MIB = 1 << 20

# The arrays are four times as large as the last-level cache and at least 256 MiB, so that no run
# reads from cache. They take at most 5 % of available memory, so that a measurement never makes a
# loaded machine swap.
_CACHE_MULTIPLE = 4
_MIN_ARRAY_BYTES = 256 * MIB
_SHARE_OF_AVAILABLE = 0.05
# Cached measurements of machines: see measurement_store.py.
FIGURES = FigureFile("bandwidth.json", sane=(0.5, 4000.0))


def measure_rates(
    *, threads: int = 0, available_bytes: int = 0, cache_bytes: int = 0, seconds: float = 1.0
) -> Measurement:
    """Measure the rate in GB/s at which the CPU can stream a model's weights.

    The result is the better rate of copying and reading, because each is a lower bound of the
    memory's bandwidth. Both are timed for about `seconds`. With `threads` 0, every core that this
    process may use takes part.

    Copying counts the bytes read and written, but not the hidden read for ownership. Reading takes
    the maximum of both arrays, because that is the access pattern of decoding. The maximum is a
    vectorised reduction. BLAS would start its own threads, and a float sum is limited by its
    additions. Each thread owns a slice, because one thread cannot saturate the bus. The first sweep
    touches the pages and is not counted.
    """
    # Imported here because it imports logging, which most starts do not need.
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    has_affinity = hasattr(os, "sched_getaffinity")
    threads = threads or (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    total_bytes = array_bytes(available_bytes, cache_bytes)
    per_thread = max(total_bytes // 2 // threads // 8, 1024)
    with ThreadPoolExecutor(threads) as pool:
        slices: list[tuple[Words, Words]] = list(
            pool.map(lambda _: (np.full(per_thread, 1), np.full(per_thread, 2)), range(threads))
        )

        def sweep(kernel: Callable[[tuple[Words, Words]], Any]) -> float:
            started_s = time.perf_counter()
            list(pool.map(kernel, slices))
            return time.perf_counter() - started_s

        def copy(pair: tuple[Words, Words]) -> None:
            np.copyto(pair[1], pair[0])

        def read(pair: tuple[Words, Words]) -> None:
            np.maximum.reduce(pair[0])
            np.maximum.reduce(pair[1])

        best_s = {copy: float("inf"), read: float("inf")}
        for kernel in best_s:
            sweep(kernel)
        times_before = ProcessorTimes.now()
        deadline_s = time.perf_counter() + seconds
        while time.perf_counter() < deadline_s:
            for kernel, best_seconds in best_s.items():
                best_s[kernel] = min(best_seconds, sweep(kernel))
        others_share = times_before.others_share(ProcessorTimes.now())
    moved_bytes = 2 * 8 * per_thread * threads
    method = f"copy and read in memory, {threads} thread(s), {moved_bytes // MIB} MiB arrays"
    gbps = round(moved_bytes / min(best_s.values()) / 1e9, 1)
    return Measurement(gbps, method, time.strftime("%Y-%m-%d"), others_share)


def array_bytes(available_bytes: int, cache_bytes: int) -> int:
    """Return the bytes of both arrays together.

    Each array has at least four times the size of the last-level cache. Together they stay within 5
    % of available memory, but take at least 16 MiB.
    """
    total_bytes = max(_CACHE_MULTIPLE * cache_bytes, _MIN_ARRAY_BYTES) * 2
    if available_bytes:
        total_bytes = min(total_bytes, max(int(available_bytes * _SHARE_OF_AVAILABLE), 16 * MIB))
    return total_bytes
