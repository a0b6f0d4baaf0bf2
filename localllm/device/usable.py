"""Compute usable memory: how many bytes a model may take, by kind of machine.

These functions do no I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.device.types import GIB, Basis, Memory
from localllm.memory.account import headroom_bytes

if TYPE_CHECKING:
    from localllm.device.parsers.gpus import AmdGpu

MIB = 1 << 20

# Margin on a card for its driver, new windows of other programs, and errors of our estimate.
# llama-server's `--fit` keeps 1 GiB on each card. Our plans know their bytes to about 2 %.
_MARGIN_SHARE = 0.02
_MIN_MARGIN = 256 * MIB

# Share of physical RAM that macOS up to 15 gave the GPU by default. Newer versions give more
# (0.74-0.84 were seen: https://github.com/antirez/ds4/pull/893,
# https://github.com/AlexsJones/llmfit/pull/754). If Metal cannot be queried, the older and smaller
# share is the safe assumption.
_MAC_SMALL_SHARE = 2 / 3
_MAC_LARGE_SHARE = 3 / 4
_MAC_SMALL_MAX_BYTES = 36 * GIB


# Assumed memory of an idle system, in addition to the headroom, and of a desktop on the card of its
# screens. The values come from people's machines. A Windows 11 desktop uses 3 to 5 GB and Linux 1
# to 2 GB. With a browser open, 0.5 to 1 GB of a card are in use.
_IDLE_BYTES = {"Windows": 4 * GIB}
_USUAL_IDLE_BYTES = 2 * GIB
_IDLE_SHARE = 1 / 8
_DESKTOP_BYTES = 768 * MIB
_DESKTOP_SHARE = 1 / 16


def described_pool(
    total_bytes: int, source: str, os: str = "", *, headless: bool = False
) -> Memory:
    """Return the system memory of a described machine.

    The headroom is kept free. A machine with a desktop also keeps the memory of an idle `os`.
    """
    system_bytes = headroom_bytes(total_bytes)
    if not headless:
        system_bytes += min(_IDLE_BYTES.get(os, _USUAL_IDLE_BYTES), int(_IDLE_SHARE * total_bytes))
    limit_bytes = total_bytes - system_bytes
    return Memory(total_bytes, limit_bytes, limit_bytes, "assumed", source, system_bytes)


def described_card(total_bytes: int, source: str, *, screens: bool) -> Memory:
    """Return the memory of a described card, without the margin.

    A card that drives `screens` also keeps memory for a desktop.
    """
    desktop_bytes = 0
    if screens:
        desktop_bytes = min(_DESKTOP_BYTES, int(_DESKTOP_SHARE * total_bytes))
    return replace(vram(total_bytes, desktop_bytes, 0, source), basis="datasheet")


def margin_bytes(total_bytes: int) -> int:
    """Return the bytes of a card that a plan leaves free: 2 %, at least 256 MiB, at most an eighth."""
    return int(min(max(_MARGIN_SHARE * total_bytes, _MIN_MARGIN), total_bytes / 8))


def vram(total_bytes: int, used_bytes: int, reserved_bytes: int, source: str) -> Memory:
    """Return the memory of a discrete card.

    The limit is its memory without the driver's own part. The memory available now also excludes
    what all programs use. The margin is recorded as kept.

    `used_bytes` may include the driver's part or not (NVML's versions differ). It is never counted
    twice.
    """
    limit_bytes = max(total_bytes - reserved_bytes, 0)
    available_bytes = max(min(total_bytes - used_bytes, limit_bytes), 0)
    return Memory(
        total_bytes,
        limit_bytes,
        available_bytes,
        "reported",
        source,
        reserved_bytes + margin_bytes(total_bytes),
        limit_bytes - available_bytes,
    )


def mac(
    memory_bytes: int,
    working_set: int | None,
    wired_limit_mb: int | None,
    free: int | None,
    available_now_bytes: int | None = None,
) -> Memory:
    """Return a Mac's GPU memory: Metal's recommendedMaxWorkingSetSize.

    This size follows iogpu.wired_limit_mb. A wired limit may exceed physical RAM, and Metal then
    reports it, so the size is limited to physical RAM. A wired limit of 0 means macOS' default, not
    "no limit".

    The memory available now is `available_now_bytes` less the headroom, as in the memory guard. If a model
    takes more than `free`, macOS compresses pages of other apps
    (https://github.com/unslothai/unsloth/pull/10804). `free` is used if `available_now_bytes` is unknown.
    """
    basis: Basis = "reported"
    if working_set:
        limit_bytes = working_set
        source = "Metal recommendedMaxWorkingSetSize"
    elif wired_limit_mb and wired_limit_mb > 0:
        limit_bytes = wired_limit_mb * MIB
        source = "sysctl iogpu.wired_limit_mb"
    else:
        limit_bytes = mac_default(memory_bytes)
        basis = "assumed"
        source = "2/3 of RAM up to 36 GB, 3/4 above (older macOS)"
    limit_bytes = min(limit_bytes, memory_bytes)
    headroom = headroom_bytes(memory_bytes)
    others_bytes = 0
    if available_now_bytes is not None:
        others_bytes = max(memory_bytes - available_now_bytes, 0)
    available_bytes = max(0, min(limit_bytes, memory_bytes - headroom - others_bytes))
    if available_now_bytes is None and free is not None:
        available_bytes = max(0, min(free, available_bytes))
    return Memory(memory_bytes, limit_bytes, available_bytes, basis, source, headroom, others_bytes)


def mac_default(memory_bytes: int) -> int:
    """Return the bytes that macOS gives the GPU if neither Metal nor the wired limit can be read.

    This is the older rule, a lower bound.
    """
    share = _MAC_SMALL_SHARE if memory_bytes <= _MAC_SMALL_MAX_BYTES else _MAC_LARGE_SHARE
    return int(memory_bytes * share)


# (GiB of RAM, share of it that macOS 26 and 27 give the GPU): Metal's own figures of an M2, an M4,
# an M5 and an M5 Max. The share between them is interpolated.
_MAC_SHARES = ((8, 2 / 3), (16, 0.74), (32, 0.78), (128, 0.84))


def mac_current(memory_bytes: int) -> int:
    """Return the bytes that a current macOS gives the GPU of a Mac with so much memory."""
    sizes, shares = zip(*_MAC_SHARES, strict=True)
    gib = memory_bytes / GIB
    above = min(bisect_right(sizes, gib), len(sizes) - 1)
    below = max(0, above - 1)
    if not sizes[0] < gib < sizes[-1]:
        return int(memory_bytes * (shares[0] if gib <= sizes[0] else shares[-1]))
    fraction = math.log(gib / sizes[below]) / math.log(sizes[above] / sizes[below])
    return int(memory_bytes * (shares[below] + fraction * (shares[above] - shares[below])))


def apu(gpu: AmdGpu, total_bytes: int, available_bytes: int) -> Memory:
    """Return the memory of an integrated Radeon as Vulkan sees it: the BIOS carve-out plus the GTT.

    The GTT is ordinary RAM that the GPU may map. MemTotal excludes the carve-out and includes the
    GTT, so neither is counted twice.
    """
    headroom = headroom_bytes(total_bytes)
    free_carve_out_bytes = max(gpu.vram_total_bytes - gpu.vram_used_bytes, 0)
    limit_bytes = gpu.vram_total_bytes + min(gpu.gtt_total_bytes, total_bytes - headroom)
    free_gtt_bytes = gpu.gtt_total_bytes - gpu.gtt_used_bytes
    available_now_bytes = free_carve_out_bytes + max(
        min(free_gtt_bytes, available_bytes - headroom), 0
    )
    installed_bytes = total_bytes + gpu.vram_total_bytes
    others_bytes = (
        max(total_bytes - available_bytes, 0) + gpu.vram_total_bytes - free_carve_out_bytes
    )
    return Memory(
        installed_bytes,
        limit_bytes,
        min(available_now_bytes, limit_bytes),
        "reported",
        "amdgpu VRAM + GTT, MemAvailable",
        headroom,
        others_bytes,
        free_carve_out_bytes,
    )


def rocm_memory(gpu: AmdGpu, ram: Memory) -> Memory:
    """Return the part of `apu`'s memory that ROCm can use.

    It is the carve-out without any other RAM, or the GTT alone if that is larger.
    """
    if gpu.vram_total_bytes >= gpu.gtt_total_bytes:
        free_bytes = max(gpu.vram_total_bytes - gpu.vram_used_bytes, 0)
        return _carve_out(gpu.vram_total_bytes, free_bytes, ram, "amdgpu VRAM, as ROCm has it")
    limit_bytes = min(gpu.gtt_total_bytes, ram.limit_bytes)
    available_bytes = max(
        0, min(gpu.gtt_total_bytes - gpu.gtt_used_bytes, ram.available_bytes, limit_bytes)
    )
    return Memory(
        ram.total_bytes + gpu.vram_total_bytes,
        limit_bytes,
        available_bytes,
        "reported",
        "amdgpu GTT, as ROCm has it; MemAvailable",
        ram.system_bytes + gpu.vram_total_bytes,
        ram.others_bytes,
    )


def _carve_out(total_bytes: int, free_bytes: int, ram: Memory, source: str) -> Memory:
    installed_bytes = ram.total_bytes + total_bytes
    used_bytes = total_bytes - free_bytes
    return Memory(
        installed_bytes,
        total_bytes,
        free_bytes,
        "reported",
        source,
        ram.total_bytes,
        used_bytes,
        free_bytes,
    )


def limited_to_seen(memory: Memory, ram: Memory, total_bytes: int, source: str) -> Memory:
    """Return the `memory` of integrated graphics as a build sees it that reports `total_bytes`.

    `ram` is the system memory. ROCm sees either the carve-out or the GTT, Vulkan both (96.0 and
    111.5 GiB on one Strix Halo: https://github.com/ollama/ollama/issues/13196).
    """
    carve_out_bytes = memory.total_bytes - ram.total_bytes
    free_bytes = memory.carve_out_bytes
    if 0 < total_bytes <= carve_out_bytes and free_bytes:
        return _carve_out(total_bytes, min(free_bytes, total_bytes), ram, source)
    limit_bytes = memory.limit_bytes
    if carve_out_bytes > 0:
        limit_bytes = free_bytes + ram.limit_bytes
    seen_bytes = min(total_bytes, limit_bytes)
    if seen_bytes == memory.limit_bytes:
        return memory
    others_bytes = ram.others_bytes
    system_bytes = ram.system_bytes
    if free_bytes:
        others_bytes += carve_out_bytes - free_bytes
    else:
        system_bytes += max(carve_out_bytes, 0)
    available_bytes = max(0, min(seen_bytes, free_bytes + ram.available_bytes))
    return replace(
        memory,
        limit_bytes=seen_bytes,
        available_bytes=available_bytes,
        source=source,
        system_bytes=system_bytes,
        others_bytes=others_bytes,
    )


def gtt_pages_advised(installed_bytes: int) -> int:
    """Return the `ttm.pages_limit` (4 KiB pages) that leaves the system 4 GiB.

    It is 32505856 on a 128 GB machine, the value documented by
    https://github.com/kyuz0/amd-strix-halo-toolboxes. The installed size is rounded up to a
    multiple of 8 GiB, as sold.
    """
    sold_gib = -(-installed_bytes // (8 * GIB)) * 8
    return max(sold_gib - 4, sold_gib // 2) * GIB // 4096
