"""How much memory MLX may use here, and the bounds this backend keeps on what MLX holds back for
reuse.

The wired limit is raised to the weights alone, and only for a model that fills much of the memory:
with room in it for buffers that come and go, several streams were reported to panic macOS
(github.com/ml-explore/mlx/issues/3186).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from localllm_backends.contract import OutOfMemoryError

# Freed buffers MLX may keep: enough for one step's temporaries, little beside any model worth
# serving.
CACHE_HIGH_BYTES = 512 * 2**20
# Left to the system where memory is shared with everything else.
_MARGIN_BYTES = 256 * 2**20
# Models above 60 to 75 % of memory ran 40 to 150 times slower unwired
# (github.com/osaurus-ai/vmlx-swift/issues/418); below half macOS leaves them where they are.
_WIRED_FROM_SHARE = 0.5


def usable_bytes(
    device: Mapping[str, Any], active_bytes: int, held_bytes: int, available_bytes: int
) -> int:
    """Bytes that can still be allocated. On Metal: what the system recommends as a working set,
    less what is in use (`device` is mx.device_info(); key max_recommended_working_set_size). With
    CUDA: what the device says is free (which may be of when it was first asked: never more than its
    total less what is in use). Elsewhere: what the operating system says is available. Both plus
    what MLX holds unused, less a margin."""
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
    """`usable_bytes` of this machine, now."""
    import psutil

    return usable_bytes(
        mx.device_info(),
        mx.get_active_memory(),
        mx.get_cache_memory(),
        psutil.virtual_memory().available,
    )


def require(needed_bytes: int, what: str) -> None:
    """OutOfMemoryError with both figures unless `needed_bytes` can be allocated; tries again
    without MLX's reserve."""
    if needed_bytes <= usable_now():
        return
    mx.clear_cache()
    usable = usable_now()
    if needed_bytes > usable:
        raise OutOfMemoryError(
            f"{what} needs {needed_bytes / 1e9:.2f} GB and {usable / 1e9:.2f} GB can be used now"
        )


def wire(*, wanted: bool) -> None:
    """Hold what is loaded in memory on a GPU, so that macOS neither compresses nor moves it, never
    more than Metal recommends; a model that is small beside the machine's memory is left where it
    is. The limit goes with the process."""
    if not wanted or mx.default_device() == mx.Device(mx.cpu):
        return
    device = mx.device_info()
    active_bytes = mx.get_active_memory()
    recommended = device.get("max_recommended_working_set_size")
    total = device.get("memory_size")
    if not isinstance(recommended, int) or not isinstance(total, int):
        return  # MLX knows no Metal device
    if active_bytes >= _WIRED_FROM_SHARE * total:
        # What loading freed would be wired as well.
        mx.clear_cache()
        mx.set_wired_limit(min(active_bytes, recommended))


def out_of_memory(error: Exception) -> bool:
    """True for what MLX throws when an allocation fails (std::bad_alloc, [malloc] and
    [metal::malloc] messages)."""
    said = str(error).lower()
    return isinstance(error, MemoryError) or "alloc" in said or "insufficient memory" in said
