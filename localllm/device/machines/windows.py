"""A Windows machine's readings to its Device: NVIDIA through NVML, other cards through the registry, else the CPU."""

from __future__ import annotations

from dataclasses import replace

from localllm.device import cpus, table, usable
from localllm.device.machines.common import Card, beside_nvidia, nvidia_card, nvidia_gpus, one_machine, ram_disagrees
from localllm.device.parsers import integer, windows
from localllm.device.types import Device, DeviceUnreadableError, Figure, Finding, Memory, Readings
from localllm.memory.account import shared_pool

GIB = 1 << 30

# What Windows lets an integrated GPU borrow of the RAM it sees: half (DXGI's SharedSystemMemory).
_SHARED_WITH_GPU = 0.5


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """The Device of these readings; raises DeviceUnreadableError if Windows did not report its memory."""
    status = windows.memory_status(readings.output("memory-status"))
    if status is None:
        raise DeviceUnreadableError("Windows did not report its memory (GlobalMemoryStatusEx)")
    total, available = status
    cpu = windows.processor(readings.output("processor"))
    told = _ram_bandwidth(readings, cpu)
    base = Device(
        name=cpu or "Windows PC",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=shared_pool(total, available, "GlobalMemoryStatusEx"),
        bandwidth_gbps=ram_bandwidth or told,
        os="Windows",
        cpu=cpu,
        n_cpu_cores=max(integer(readings.output("cores")) or 0, 0),
        findings=(*_emulation(readings), *ram_disagrees(ram_bandwidth, told)),
    )
    cards: list[Card] = []
    gpus, hidden = nvidia_gpus(readings)
    base = replace(base, findings=(*base.findings, *hidden))
    adapters = windows.adapters(readings.output("display-class"))
    for gpu in gpus:
        card, findings = nvidia_card(gpu)
        base = replace(base, findings=(*base.findings, *findings))
        cards += [card] if card else []
    if cards:
        others = [card.name for card in _cards(adapters)]
        if others:
            base = replace(base, findings=(*base.findings, beside_nvidia(others)))
        return one_machine(cards, "cuda", base.memory, base.bandwidth_gbps, base)
    if any(adapter.vendor == "10de" for adapter in adapters) and not gpus and not hidden:
        fix = "install the NVIDIA driver, then check with nvidia-smi"
        finding = Finding("error", "an NVIDIA GPU is in this machine but its driver does not answer: not used", fix)
        base = replace(base, findings=(*base.findings, finding))
    row = table.by_cpu(cpu)
    alone = replace(base, match=row.name, family=row.family) if row is not None and row.accelerator == "cpu" else base
    return _integrated(adapters, base, total, available, told) or _discrete(adapters, base) or alone


def _ram_bandwidth(readings: Readings, cpu: str) -> Figure | None:
    sticks = windows.physical_memory(readings.output("physical-memory"), cpus.channels(cpu))
    if sticks is not None:
        source = (
            f"Win32_PhysicalMemory: {sticks.modules} module(s), {sticks.bus_bits} bit at {sticks.megatransfers_s} MT/s"
        )
        return Figure(round(sticks.bandwidth_gbps, 1), "derived", source)
    row = table.by_cpu(cpu)
    return row.bandwidth if row else None


def _emulation(readings: Readings) -> tuple[Finding, ...]:
    if readings.output("native-architecture").strip().upper() == "ARM64" and readings.architecture.upper() == "AMD64":
        return (Finding("warning", "an x64 Python runs emulated on this ARM PC", "install the ARM64 Python"),)
    return ()


def _cards(adapters: list[windows.Adapter]) -> list[Card]:
    """Known discrete cards that are not NVIDIA's."""
    cards = []
    for adapter in adapters:
        row = table.by_gpu_name(adapter.name, adapter.memory_bytes or None)
        if row is None or row.kind != "discrete" or adapter.vendor == "10de":
            continue
        size = adapter.memory_bytes or int(row.memory_gb[0] * GIB)
        memory = usable.vram(size, 0, 0, "registry HardwareInformation.qwMemorySize")
        cards.append(Card(adapter.name, memory, row.bandwidth, row, row.compute_capability, row.compute_units))
    return cards


def _discrete(adapters: list[windows.Adapter], base: Device) -> Device | None:
    cards = _cards(adapters)
    if not cards:
        return None
    note = Finding("info", "memory in use on this card can't be read here: all of it counts as free")
    base = replace(base, findings=(*base.findings, note))
    return one_machine(cards, "vulkan", base.memory, base.bandwidth_gbps, base)


def _integrated(
    adapters: list[windows.Adapter], base: Device, total: int, available: int, told: Figure | None
) -> Device | None:
    """A known APU: what its BIOS gave it (missing from the RAM Windows sees) plus half of the rest.

    Left to a discrete card where there is one: an APU's share is never added to a card's memory.
    """
    found = [(a, table.by_gpu_name(a.name) or table.by_cpu(base.cpu)) for a in adapters]
    if any(row is not None and row.kind == "discrete" for _, row in found):
        return None
    for adapter, row in found:
        if row is None or row.kind != "unified" or row.vendor not in ("AMD", "Intel"):
            continue
        by_cpu = table.by_cpu(base.cpu)
        row = by_cpu if by_cpu is not None and by_cpu.kind == "unified" else row
        dedicated = adapter.memory_bytes
        shared = int(total * _SHARED_WITH_GPU)
        keep, others = base.memory.system_bytes, base.memory.others_bytes
        memory = Memory(
            total + dedicated,
            dedicated + shared,
            dedicated + max(0, min(shared, available - keep)),
            "reported",
            "registry qwMemorySize + half of the RAM Windows sees",
            keep,
            others,
            dedicated,
        )
        return replace(
            base,
            name=adapter.name,
            kind="unified",
            accelerator="vulkan",
            family=row.family,
            memory=memory,
            bandwidth_gbps=row.bandwidth if "Halo" in row.family else told or row.bandwidth or base.bandwidth_gbps,
            **table.facts(row),
            compute_capability=row.compute_capability,
        )
    return None
