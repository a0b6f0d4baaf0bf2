"""Turn a Windows machine's readings into its Device.

NVIDIA cards come from NVML, other cards from the registry. Without a card, the Device is the CPU.
"""

from __future__ import annotations

import re
from dataclasses import replace

from localllm.device import cpus, parts_table, usable
from localllm.device.machines import common, one_pool
from localllm.device.machines.common import (
    as_processor,
    card_of,
    modules_bandwidth,
    no_driver,
    nvidia_cards,
    nvidia_gpus,
    one_machine,
    ram_disagrees,
    shared_bandwidth,
    unused_cards,
    with_findings,
)
from localllm.device.parsers import integer, windows
from localllm.device.types import (
    GIB,
    Device,
    DeviceUnreadableError,
    Figure,
    Finding,
    Readings,
)
from localllm.memory.account import shared_pool

# Share of visible RAM that Windows lets an integrated GPU borrow: half (DXGI's SharedSystemMemory).
_SHARED_WITH_GPU = 0.5


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """Return the Device of these readings.

    Raises DeviceUnreadableError if Windows did not report its memory.
    """
    status = windows.memory_status(readings.output("memory-status"))
    if status is None:
        raise DeviceUnreadableError("Windows did not report its memory (GlobalMemoryStatusEx)")
    total_bytes, available_bytes = status
    cpu = windows.processor(readings.output("processor"))
    modules = windows.physical_memory(readings.output("physical-memory"), cpus.channels(cpu))
    reported = modules_bandwidth(modules, "Win32_PhysicalMemory")
    base = Device(
        name=cpu or "Windows PC",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=shared_pool(total_bytes, available_bytes, "GlobalMemoryStatusEx"),
        bandwidth_gbps=common.ram_bandwidth(ram_bandwidth, reported, cpu, ""),
        os="Windows",
        cpu=cpu,
        n_cpu_cores=max(integer(readings.output("cores")) or 0, 0),
        findings=(*_emulation(readings), *ram_disagrees(ram_bandwidth, reported)),
    )
    gpus, hidden_findings = nvidia_gpus(readings)
    base = with_findings(base, hidden_findings)
    adapters = windows.adapters(readings.output("display-class"))
    shared_device = one_pool.first_integrated(readings, gpus, base)
    if shared_device is not None:
        return shared_device
    cards, findings = nvidia_cards(gpus)
    base = with_findings(base, findings)
    if cards:
        return _with_nvidia(cards, adapters, base)
    if not (gpus or hidden_findings) and any(adapter.vendor == "10de" for adapter in adapters):
        fix = "install the NVIDIA driver, then check with nvidia-smi"
        base = with_findings(base, [no_driver(fix)])
    return (
        _integrated(adapters, base, available_bytes, reported)
        or _discrete(adapters, base)
        or as_processor(base)
    )


def _with_nvidia(cards: list[Device], adapters: list[windows.Adapter], base: Device) -> Device:
    """Return the machine by its NVIDIA cards, with a finding on the GPUs that CUDA does not use."""
    other_gpus = [card.name for card in _cards(adapters)] + _pools(adapters, base)
    if other_gpus:
        base = with_findings(base, [unused_cards(other_gpus)])
    return one_machine(cards, base)


def _emulation(readings: Readings) -> tuple[Finding, ...]:
    native = readings.output("native-architecture").strip().upper()
    if (native, readings.architecture.upper()) != ("ARM64", "AMD64"):
        return ()
    reported = "an x64 Python runs emulated on this ARM PC"
    return (Finding("warning", reported, "install the ARM64 Python"),)


# Vendors whose cards are read from the registry. NVIDIA's driver reports its own cards.
_MAKERS = {"1002": "AMD", "8086": "Intel"}


def _cards(adapters: list[windows.Adapter]) -> list[Device]:
    """Return discrete cards of other vendors than NVIDIA.

    These are the cards in the table, and cards with more memory of their own than integrated
    graphics have.
    """
    cards = []
    for adapter in adapters:
        row = parts_table.by_gpu_name(adapter.name, adapter.memory_bytes or None)
        maker = _MAKERS.get(adapter.vendor, "")
        if row is None:
            family = "vulkan"
            is_card = _is_unknown_card(adapter)
        else:
            family = row.family
            is_card = row.kind == "discrete"
            maker = maker or row.vendor
        if not is_card or maker not in _MAKERS.values():
            continue
        size_bytes = adapter.memory_bytes
        if row is not None and not size_bytes:
            size_bytes = int(row.memory_gb[0] * GIB)
        memory = usable.vram(size_bytes, 0, 0, "registry HardwareInformation.qwMemorySize")
        card = card_of(maker, adapter.name, memory, row)
        cards.append(replace(card, accelerator="vulkan", family=family))
    return cards


def _pools(adapters: list[windows.Adapter], base: Device) -> list[str]:
    """Return AMD's known integrated GPUs with the memory that each may use."""
    pools = []
    for adapter in adapters:
        row = parts_table.by_gpu_name(adapter.name)
        if row is None or row.kind != "unified" or row.vendor != "AMD":
            continue
        usable_bytes = adapter.memory_bytes + int(base.memory.total_bytes * _SHARED_WITH_GPU)
        pools.append(f"{adapter.name} ({usable_bytes / GIB:.0f} GiB, shared)")
    return pools


def _is_unknown_card(adapter: windows.Adapter) -> bool:
    """Return True for an unlisted adapter that must be a card.

    Its name has a card's series, and it has more memory than integrated graphics with similar names
    ("RX Vega 11") get.
    """
    series = re.search(r"\b(?:RX|(?:WX?|V|MI|[AB])[0-9]{2})", adapter.name)
    return series is not None and adapter.memory_bytes >= 3 * GIB


def _discrete(adapters: list[windows.Adapter], base: Device) -> Device | None:
    cards = _cards(adapters)
    if not cards:
        return None
    reported = "memory in use on this card can't be read, so all of it counts as free"
    return one_machine(cards, with_findings(base, [Finding("info", reported)]))


def _integrated(
    adapters: list[windows.Adapter], base: Device, available_bytes: int, reported: Figure | None
) -> Device | None:
    """Return the Device of a known APU.

    Its memory is the part reserved by the BIOS plus half of the RAM that Windows sees. Windows does
    not see the reserved part. Returns None if there is a discrete card: an APU's share is never
    added to a card's memory.
    """
    by_cpu = parts_table.by_cpu(base.cpu)
    adapters_and_rows = [
        (adapter, parts_table.by_gpu_name(adapter.name) or by_cpu) for adapter in adapters
    ]
    if any(row is not None and row.kind == "discrete" for _, row in adapters_and_rows):
        return None
    for adapter, row in adapters_and_rows:
        if row is None or row.kind != "unified" or row.vendor not in ("AMD", "Intel"):
            continue
        if by_cpu is not None and by_cpu.kind == "unified":
            row = by_cpu
        ram = base.memory
        own_bytes = adapter.memory_bytes
        shared_bytes = int(ram.total_bytes * _SHARED_WITH_GPU)
        available_now = own_bytes + max(0, min(shared_bytes, available_bytes - ram.system_bytes))
        return replace(
            base,
            name=adapter.name,
            kind="unified",
            accelerator="vulkan",
            family=row.family,
            memory=replace(
                ram,
                total_bytes=ram.total_bytes + own_bytes,
                limit_bytes=own_bytes + shared_bytes,
                available_bytes=available_now,
                source="registry qwMemorySize + half of the RAM Windows sees",
                carve_out_bytes=own_bytes,
            ),
            bandwidth_gbps=shared_bandwidth(row, reported, base),
            **parts_table.device_fields(row),
            compute_capability=row.compute_capability,
        )
    return None
