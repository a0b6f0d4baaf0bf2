"""Override a device's memory, its bandwidth, or the memory kept free for other programs."""

from __future__ import annotations

from dataclasses import replace

from localllm.device import cards, usable
from localllm.device.ram import StatedRam
from localllm.device.synthetic_device import Computer, with_host
from localllm.device.types import GIB, Device, Figure, Finding, Memory
from localllm.errors import UsageError
from localllm.memory.account import keeping


def with_memory(
    device: Device,
    *,
    ram_gb: float | None = None,
    vram_headroom_gb: float | None = None,
    headroom_gb: float | None = None,
) -> Device:
    """Return `device` with other system memory or other headroom than assumed.

    `ram_gb` is the size of system memory (GiB as sold). The headrooms (GB) are kept free for other
    programs, on the cards and in system memory. Raises UsageError if a value does not fit the
    device.
    """
    if ram_gb is not None:
        if device.kind != "discrete":
            maker, _, _ = device.name.partition(" ")
            raise UsageError(
                f"{device.name} has a single memory: give its size with the name, "
                f"such as {maker} 64GB"
            )
        device = replace(with_host(device, Computer([], ram=StatedRam(ram_gb))), simulated=True)
    if vram_headroom_gb is not None:
        device = _with_card_headroom(device, vram_headroom_gb)
    if headroom_gb is not None:
        if device.kind != "discrete":
            device = replace(device, memory=_with_headroom(device, device.memory, headroom_gb))
        elif device.host is not None:
            device = replace(device, host=_with_headroom(device, device.host, headroom_gb))
    return device


def _with_headroom(device: Device, pool: Memory, headroom_gb: float) -> Memory:
    if headroom_gb * 1e9 >= pool.total_bytes:
        raise UsageError(
            f"--headroom {headroom_gb:g} leaves no memory of {pool.total_bytes / 1e9:.1f} GB"
        )
    with_headroom = keeping(pool, int(headroom_gb * 1e9), others_bytes=pool.others_bytes)
    if device.accelerator != "metal":
        return with_headroom
    # macOS decides how much the GPU gets, so the limit is never raised.
    limit_bytes = min(pool.limit_bytes, with_headroom.limit_bytes)
    return replace(
        with_headroom,
        limit_bytes=limit_bytes,
        available_bytes=min(with_headroom.available_bytes, limit_bytes),
    )


def _with_card_headroom(device: Device, headroom_gb: float) -> Device:
    """Keep `headroom_gb` free on the cards, divided among several cards by their memory.

    On a described card, the desktop's assumed use is part of the headroom.
    """
    keep_bytes = int(headroom_gb * 1e9)
    total_memory = device.memory
    if keep_bytes >= total_memory.limit_bytes:
        raise UsageError(
            f"--vram-headroom {headroom_gb:g} leaves no memory of "
            f"{total_memory.limit_bytes / 1e9:.1f} GB"
        )

    def kept(memory: Memory) -> Memory:
        card_bytes = round(keep_bytes * memory.limit_bytes / total_memory.limit_bytes)
        others_bytes = 0 if device.simulated else memory.others_bytes
        limit_left = max(0, memory.limit_bytes - card_bytes)
        available_now = min(limit_left, max(0, memory.total_bytes - card_bytes - others_bytes))
        return replace(
            memory,
            limit_bytes=limit_left,
            available_bytes=available_now,
            system_bytes=card_bytes,
            others_bytes=others_bytes,
        )

    return cards.with_each_memory(device, kept)


def overridden(
    device: Device, *, memory_gb: float | None = None, bandwidth_gbps: float | None = None
) -> Device:
    """Return `device` as if it had this much usable memory (GiB) or this bandwidth.

    Returns it unchanged without either. Raises UsageError for values that are not positive.
    """
    check_overrides(memory_gb, bandwidth_gbps)
    if device.accelerator == "cpu" and (memory_gb, bandwidth_gbps) != (None, None):
        message = f"planned with this machine's CPU, with {device.n_cpu_cores} cores"
        finding = Finding("info", message, "--device NAME")
        device = replace(device, findings=(*device.findings, finding))
    if memory_gb is not None:
        size_bytes = int(memory_gb * GIB)
        if device.kind == "discrete":
            memory = usable.described_card(size_bytes, "--memory", screens=True)
        else:
            memory = usable.described_pool(
                size_bytes, "--memory, less the memory reserved for the system", device.os
            )
            if device.accelerator == "metal":
                memory = usable.mac(size_bytes, None, None, None)
        device = replace(device, memory=replace(memory, basis="given"), simulated=True, cards=())
    if bandwidth_gbps is not None:
        figure = Figure(bandwidth_gbps, "given", "--bandwidth")
        # A different bandwidth means a different machine. The rates measured on this processor do
        # not apply to it.
        other_findings = tuple(
            finding for finding in device.findings if "assumed" not in finding.message
        )
        device = replace(
            device, bandwidth_gbps=figure, simulated=True, matrix_rates=(), findings=other_findings
        )
    return device


def check_overrides(memory_gb: float | None, bandwidth_gbps: float | None) -> None:
    for option, value in (("--memory", memory_gb), ("--bandwidth", bandwidth_gbps)):
        if value is not None and not 0 < value < 1e6:
            raise UsageError(f"{option} must be a positive number, not {value:g}")
