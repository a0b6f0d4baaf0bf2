"""What the systems share: discrete NVIDIA cards to one pool, host memory, RAM bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device import table, usable
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
    cards: Sequence[Card], accelerator: Accelerator, host: Memory | None, ram_bandwidth: Figure | None, base: Device
) -> Device:
    """Discrete cards as one Device: memory adds up (layers are split), bandwidth is what a token meets on its way.

    Each card streams its share of the weights in turn, so the rate is total ÷ Σ(memory ÷ bandwidth).
    """
    biggest = max(cards, key=lambda card: (card.memory.total_bytes, card.bandwidth.value if card.bandwidth else 0.0))
    fp16, fp8, fp4 = table.tflops(biggest.row) if biggest.row else (None, None, None)
    findings = list(base.findings)
    if len(cards) > 1:
        findings.append(
            Finding("info", f"{len(cards)} GPUs: memory adds up (layers are split), speed is about that of one")
        )
    return replace(
        base,
        name=_joined(cards),
        kind="discrete",
        accelerator=accelerator,
        family=biggest.row.family if biggest.row else accelerator,
        memory=_sum([card.memory for card in cards]),
        bandwidth_gbps=_in_turn(cards),
        host=host,
        host_bandwidth_gbps=ram_bandwidth,
        fp16_tflops=fp16,
        fp8_tflops=fp8,
        fp4_tflops=fp4,
        compute_units=biggest.compute_units,
        compute_capability=biggest.compute_capability,
        match=biggest.row.name if biggest.row else "",
        n_gpus=len(cards),
        cards_bytes=tuple(card.memory.limit_bytes for card in cards) if len(cards) > 1 else (),
        findings=tuple(findings),
    )


def _joined(cards: Sequence[Card]) -> str:
    counted = Counter(card.name for card in cards)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in counted.items())


def _sum(memories: Sequence[Memory]) -> Memory:
    if len(memories) == 1:
        return memories[0]
    return Memory(
        sum(m.total_bytes for m in memories),
        sum(m.limit_bytes for m in memories),
        sum(m.available_bytes for m in memories),
        memories[0].basis,
        memories[0].source,
    )


def _in_turn(cards: Sequence[Card]) -> Figure | None:
    figures = [card.bandwidth for card in cards]
    if len({(f.value, f.basis) if f else None for f in figures}) == 1:
        return figures[0]
    seconds = 0.0
    for card in cards:
        if card.bandwidth is None:
            return None
        seconds += card.memory.total_bytes / card.bandwidth.value
    total = sum(card.memory.total_bytes for card in cards)
    return Figure(round(total / seconds, 1), "derived", "GPUs read in turn: total memory ÷ Σ(memory ÷ bandwidth)")
