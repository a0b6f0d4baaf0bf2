"""GNU's OpenMP, with which ggml computes on Linux: every thread that computes keeps helpers; who seldom does lets them go.

Once all callers' helpers together are more than the processors, libgomp's threads hardly look at a barrier before they sleep at it
(libgomp/config/linux/wait.h: `gomp_throttled_spin_count_var`), and a step has hundreds: with a second caller's two threads
at rest on two processors a decode step of SmolLM2 took 18.7 ms and slept 680 times, without them 12.4 ms and never.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from localllm_backends.llamacpp.cores import processors

# omp_pause_soft, OpenMP 5.0, section 2.11.8: what is given up comes back with the next parallel region.
_SOFT = 1


def release_helpers(n_threads: int) -> None:
    """Let go of the helpers this thread computes with, if two callers of `n_threads` each are more threads than processors;
    they are made anew (some 0.1 ms) when it computes next. Call it outside of any computation. Does nothing where another
    library than GNU's is used, or none."""
    library = _libgomp()
    if library is not None and 2 * n_threads > processors():
        library.omp_pause_resource_all(_SOFT)


@cache
def _libgomp() -> Any:
    """The one ggml's CPU backend is linked with, once that is loaded: asked through it, since other packages bring copies of
    their own into this process."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next((line[line.index("/") :].strip() for line in maps if "/libggml-cpu" in line), None)
        library = ctypes.CDLL(path) if path else None
        return library if hasattr(library, "omp_pause_resource_all") else None
    except OSError:
        return None
