"""The memory that MLX may use here, and the limits on freed memory that MLX keeps for reuse.

The wired limit is raised only to the size of the weights, and only for a model that fills much of
the memory. With room for temporary buffers in it, several streams were reported to panic macOS
(github.com/ml-explore/mlx/issues/3186).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from localllm_backends.contract import OutOfMemoryError

# Freed buffers that MLX may keep: enough for the temporaries of one step, and small compared with
# any model.
CACHE_HIGH_BYTES = 512 * 2**20
# Memory left to the system if it is shared with the GPU or other processes.
_MARGIN_BYTES = 256 * 2**20
# Models above 60 to 75 % of memory ran 40 to 150 times slower unwired
# (github.com/osaurus-ai/vmlx-swift/issues/418). Below half, macOS does not move them.
_WIRED_FROM_SHARE = 0.5


def usable_bytes(
    device: Mapping[str, Any], active_bytes: int, held_bytes: int, available_bytes: int
) -> int:
    """Return the bytes that can still be allocated.

    * On Metal: the system's recommended working set minus the bytes in use. (`device` is
      mx.device_info(), with key max_recommended_working_set_size.)
    * With CUDA: the free memory that the device reports. That figure may be from the first query,
      so it is limited to the total minus the bytes in use.
    * Elsewhere: the available memory that the operating system reports.

    The latter two include freed memory that MLX holds, minus a margin.
    """
    recommended = device.get("max_recommended_working_set_size")
    if isinstance(recommended, int) and recommended > 0:
        return max(0, recommended - active_bytes)
    free = device.get("free_memory")
    total = device.get("total_memory")
    if isinstance(free, int) and isinstance(total, int) and total > 0:
        usable = min(free + held_bytes, total - active_bytes)
        return max(0, usable - _MARGIN_BYTES)
    return max(0, available_bytes + held_bytes - _MARGIN_BYTES)


def usable_now() -> int:
    """Return `usable_bytes` of this machine now."""
    import psutil

    return usable_bytes(
        mx.device_info(),
        mx.get_active_memory(),
        mx.get_cache_memory(),
        psutil.virtual_memory().available,
    )


def require(needed_bytes: int, purpose: str) -> None:
    """Raise OutOfMemoryError with both figures unless `needed_bytes` can be allocated.

    Clears MLX's cache of freed memory if that is necessary.
    """
    if needed_bytes <= usable_now():
        return
    mx.clear_cache()
    usable = usable_now()
    if needed_bytes > usable:
        raise OutOfMemoryError(
            f"{purpose} needs {needed_bytes / 1e9:.2f} GB, but "
            f"{usable / 1e9:.2f} GB are available now"
        )


def wire(*, enabled: bool) -> None:
    """Wire the loaded model in GPU memory, so that macOS neither compresses nor moves it.

    The limit never exceeds Metal's recommendation and lasts as long as the process. A model that is
    small compared with the machine's memory is not wired.
    """
    if not enabled or mx.default_device() == mx.Device(mx.cpu):
        return
    device = mx.device_info()
    active_bytes = mx.get_active_memory()
    recommended = device.get("max_recommended_working_set_size")
    total = device.get("memory_size")
    if not isinstance(recommended, int) or not isinstance(total, int):
        return  # not a Metal device
    if active_bytes >= _WIRED_FROM_SHARE * total:
        # Memory that was freed while loading would be wired too.
        mx.clear_cache()
        mx.set_wired_limit(min(active_bytes, recommended))


def out_of_memory(error: Exception) -> bool:
    """Return whether MLX raised this error because an allocation failed.

    Such errors have std::bad_alloc, [malloc] or [metal::malloc] messages.
    """
    text = str(error).lower()
    return isinstance(error, MemoryError) or "alloc" in text or "insufficient memory" in text
