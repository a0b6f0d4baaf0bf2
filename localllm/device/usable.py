"""Usable memory, not installed memory: how many bytes a model may take, by kind of machine. Pure rules."""

from __future__ import annotations

from localllm.device.parsers.gpus import AmdGpu
from localllm.device.parsers.linux import CgroupLimit
from localllm.device.types import Memory

GIB = 1 << 30
MIB = 1 << 20

# A GB10 that fills its pool freezes rather than failing an allocation (seen at 97 %), so 5 % of the total stays free
# on every pool an operating system lives in too. https://docs.nvidia.com/dgx/dgx-spark/known-issues.html
KEEP_FREE = 0.05

# The part of physical RAM that macOS up to 15 gave the GPU by default; newer versions give more (0.74-0.84 were seen:
# https://github.com/antirez/ds4/pull/893, https://github.com/AlexsJones/llmfit/pull/754). The older, smaller fraction
# is the one that is safe to assume where Metal can't be asked.
_MAC_SMALL, _MAC_LARGE, _MAC_SMALL_UP_TO = 2 / 3, 3 / 4, 36 * GIB


def shared_pool(total_bytes: int, available_bytes: int, source: str) -> Memory:
    """System memory, or one that CPU and GPU share (GB10, Jetson): all of it but 5 %, now what is available but 5 %.

    `available_bytes` must include reclaimable page cache (MemAvailable, never MemFree).
    """
    keep = int(total_bytes * KEEP_FREE)
    limit = total_bytes - keep
    return Memory(total_bytes, limit, max(min(available_bytes - keep, limit), 0), "reported", source)


def in_container(total_bytes: int, available_bytes: int, limit: CgroupLimit | None) -> tuple[int, int, str]:
    """(total, available, why) of system memory under a cgroup limit: /proc/meminfo shows the host's, not ours."""
    if limit is None or limit.limit_bytes >= total_bytes:
        return total_bytes, available_bytes, ""
    free = max(limit.limit_bytes - limit.used_bytes, 0)
    return limit.limit_bytes, min(available_bytes, free), f"limited by {limit.where}"


def vram(total_bytes: int, used_bytes: int, reserved_bytes: int, source: str) -> Memory:
    """A discrete card: its memory less the driver's own part; now, less what is in use by anyone."""
    limit = max(total_bytes - reserved_bytes, 0)
    return Memory(total_bytes, limit, max(min(total_bytes - used_bytes, limit), 0), "reported", source)


def mac(memory_bytes: int, working_set: int | None, wired_limit_mb: int | None, available: int | None) -> Memory:
    """A Mac's GPU budget: Metal's recommendedMaxWorkingSetSize, which follows iogpu.wired_limit_mb.

    A wired limit may be set above physical RAM and Metal repeats it: clamped. A limit of 0 means macOS' default, not
    "no limit". Available memory is a soft limit: past it macOS compresses and swaps other apps, slow but alive
    (https://github.com/unslothai/unsloth/pull/10804).
    """
    if working_set:
        limit, basis, source = working_set, "reported", "Metal recommendedMaxWorkingSetSize"
    elif wired_limit_mb and wired_limit_mb > 0:
        limit, basis, source = wired_limit_mb * MIB, "reported", "sysctl iogpu.wired_limit_mb"
    else:
        limit, basis, source = mac_default(memory_bytes), "assumed", "2/3 of RAM up to 36 GB, 3/4 above (older macOS)"
    limit = min(limit, memory_bytes)
    now = limit if available is None else min(available, limit)
    return Memory(memory_bytes, limit, now, "reported" if basis == "reported" else "assumed", source)


def mac_default(memory_bytes: int) -> int:
    """Bytes macOS gives the GPU where neither Metal nor the wired limit can be asked: the older rule, a floor."""
    return int(memory_bytes * (_MAC_SMALL if memory_bytes <= _MAC_SMALL_UP_TO else _MAC_LARGE))


def apu(gpu: AmdGpu, total_bytes: int, available_bytes: int) -> Memory:
    """A Radeon inside a processor: its BIOS carve-out plus the GTT, which is ordinary RAM it may map.

    The carve-out is missing from MemTotal, the GTT is inside it: they are never counted twice.
    """
    keep = int(total_bytes * KEEP_FREE)
    limit = gpu.vram_total_bytes + min(gpu.gtt_total_bytes, total_bytes - keep)
    now = max(gpu.vram_total_bytes - gpu.vram_used_bytes, 0) + max(
        min(gpu.gtt_total_bytes - gpu.gtt_used_bytes, available_bytes - keep), 0
    )
    return Memory(
        total_bytes + gpu.vram_total_bytes, limit, min(now, limit), "reported", "amdgpu VRAM + GTT, MemAvailable"
    )


def gtt_pages_advised(installed_bytes: int) -> int:
    """`ttm.pages_limit` (4 KiB pages) that leaves the system 4 GiB: 32505856 on a 128 GB machine, the value
    https://github.com/kyuz0/amd-strix-halo-toolboxes documents. Installed size is rounded up to the 8 GiB sold."""
    sold = -(-installed_bytes // (8 * GIB)) * 8
    return max(sold - 4, sold // 2) * GIB // 4096
