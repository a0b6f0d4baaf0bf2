"""What the systems share: discrete NVIDIA cards to one pool, host memory, RAM bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device import cards, table, usable
from localllm.device.parsers.gpus import NvidiaGpu
from localllm.device.table import DeviceRow
from localllm.device.types import Accelerator, Device, Figure, Finding, Memory

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Card:
    """One discrete GPU as we understand it: memory in bytes, bandwidth in GB/s, its row if the table knows it."""

    name: str
    memory: Memory
    bandwidth: Figure | None
    row: DeviceRow | None
    compute_capability: str = ""
    compute_units: int = 0


def nvidia_card(gpu: NvidiaGpu) -> tuple[Card | None, list[Finding]]:
    """A discrete NVIDIA card; None when neither the driver nor the table says how much memory it has."""
    findings: list[Finding] = []
    row = None if " MIG " in gpu.name else table.by_gpu_name(gpu.name, gpu.total_bytes, gpu.derived_bandwidth_gbps)
    if gpu.total_bytes is not None:
        used = gpu.used_bytes
        if used is None and gpu.free_bytes is not None:
            used = gpu.total_bytes - gpu.free_bytes
        memory = usable.vram(gpu.total_bytes, max(used or 0, 0), gpu.reserved_bytes or 0, "NVIDIA driver (NVML)")
    elif row is not None and row.memory_gb:
        size = int(row.memory_gb[0] * GIB)
        memory = Memory(size, size, size, "datasheet", row.source)
        findings.append(Finding("warning", f"the driver does not say how much memory of {gpu.name} is in use"))
    else:
        return None, [Finding("warning", f"{gpu.name} reports no memory size and is not in the table: not used")]
    bandwidth, warned = _nvidia_bandwidth(gpu, row)
    findings += warned
    limit, default = gpu.power_limit_w, gpu.default_power_limit_w
    if limit and default and limit < 0.8 * default:
        findings.append(
            Finding("info", f"{gpu.name} is limited to {limit:.0f} W of {default:.0f} W: prompts are read slower")
        )
    capability = gpu.compute_capability or (row.compute_capability if row else "")
    return Card(gpu.name, memory, bandwidth, row, capability, row.compute_units if row else 0), findings


def _nvidia_bandwidth(gpu: NvidiaGpu, row: DeviceRow | None) -> tuple[Figure | None, list[Finding]]:
    """The table's figure; the driver's clock × width for unknown names, and where the two differ by over a tenth."""
    if " MIG " in gpu.name:
        return None, [Finding("info", "a MIG slice has its own memory but shares bandwidth: speed is not estimated")]
    derived = gpu.derived_bandwidth_gbps
    told = Figure(round(derived, 1), "derived", "2 × max memory clock × bus width (NVML)") if derived else None
    known = row.bandwidth if row else None
    if known and told and abs(told.value - known.value) > 0.1 * known.value:
        message = f"{gpu.name}: the table says {known.value:g} GB/s, its clocks say {told.value:g}; took its clocks"
        return told, [Finding("warning", message)]
    if known is None and told is None:
        return None, [Finding("info", f"{gpu.name} is not in the table: its bandwidth is unknown, give --bandwidth")]
    return known or told, []


def one_machine(
    found: Sequence[Card], accelerator: Accelerator, host: Memory | None, ram_bandwidth: Figure | None, base: Device
) -> Device:
    """Discrete cards as one Device, in the order of their PCI addresses."""
    findings = list(base.findings)
    if len(found) > 1:
        told = f"{len(found)} GPUs: a model that one of them holds runs on the fastest that does; larger ones are divided by layers"
        findings.append(Finding("info", told))
    base = replace(
        base,
        kind="discrete",
        accelerator=accelerator,
        host=host,
        host_bandwidth_gbps=ram_bandwidth,
        findings=tuple(findings),
        cards=(),
    )
    return cards.together(cards.numbered([_alone(card, base) for card in found]))


def _alone(card: Card, base: Device) -> Device:
    """`base` with this one card."""
    fp16, fp8, fp4 = table.tflops(card.row) if card.row else (None, None, None)
    return replace(
        base,
        name=card.name,
        family=card.row.family if card.row else base.accelerator,
        memory=card.memory,
        bandwidth_gbps=card.bandwidth,
        fp16_tflops=fp16,
        fp8_tflops=fp8,
        fp4_tflops=fp4,
        compute_units=card.compute_units,
        compute_capability=card.compute_capability,
        match=card.row.name if card.row else "",
    )
