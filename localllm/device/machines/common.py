"""What the systems share: discrete NVIDIA cards to one pool, host memory, RAM bandwidth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.device import cards, table, usable
from localllm.device.parsers.gpus import NvidiaGpu, environment, nvml, smi, visible
from localllm.device.parsers.sticks import Ram
from localllm.device.table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, Figure, Finding, Memory, Readings


@dataclass(frozen=True, slots=True)
class Card:
    """One discrete GPU as we understand it: memory in bytes, bandwidth in GB/s, its row if the
    table knows it."""

    name: str
    memory: Memory
    bandwidth: Figure | None
    row: DeviceRow | None
    compute_capability: str = ""
    compute_units: int = 0


# Programs read 60 to 90 % of what memory modules are made for; less than half means that one of the
# two figures is wrong.
_DISAGREE = 2.0


def ram_disagrees(measured: Figure | None, told: Figure | None) -> list[Finding]:
    """What there is to say where a measured bandwidth of system memory is far from what its modules
    are made for."""
    if (
        measured is None
        or told is None
        or 1 / _DISAGREE <= measured.value / told.value <= _DISAGREE
    ):
        return []
    said = (
        f"memory was measured at {measured.value:,.0f} GB/s, and {told.source} is "
        f"{told.value:,.0f} GB/s: the measured one counts"
    )
    return [Finding("info", said, "localllm device --measure while nothing else runs")]


def modules_bandwidth(modules: Ram | None, source: str, cpu: str) -> Figure | None:
    """Without a measurement: the fitted memory modules, as `source` lists them, else the
    processor's row; None in most virtual machines."""
    if modules is not None:
        told = (
            f"{source}: {modules.modules} module(s), {modules.bus_bits} bit at "
            f"{modules.megatransfers_s} MT/s"
        )
        return Figure(round(modules.bandwidth_gbps, 1), "derived", told)
    row = table.by_cpu(cpu)
    return row.bandwidth if row else None


def with_findings(device: Device, findings: Sequence[Finding]) -> Device:
    return replace(device, findings=(*device.findings, *findings))


def nvidia_gpus(readings: Readings) -> tuple[list[NvidiaGpu], list[Finding]]:
    """The NVIDIA GPUs that programs started here see, and what hides others."""
    gpus = nvml(readings.output("nvml")) or smi(readings.output("nvidia-smi"))
    said = environment(readings).get("CUDA_VISIBLE_DEVICES")
    left = visible(said, [gpu.uuid for gpu in gpus])
    if len(left) == len(gpus):
        return gpus, []
    told = f"CUDA_VISIBLE_DEVICES={said} leaves {len(left)} of {len(gpus)} NVIDIA GPUs"
    if environment(readings).get("CUDA_DEVICE_ORDER") == "FASTEST_FIRST":
        told += (
            "; with CUDA_DEVICE_ORDER=FASTEST_FIRST it may mean others than the ones that are "
            "planned with"
        )
    return [gpus[i] for i in left], [Finding("info", told)]


# Families whose cards are cut into slices (MIG, vGPU): one that does not say its size may be a
# slice of any.
_SLICED = "workstation/datacenter"


def nvidia_card(gpu: NvidiaGpu) -> tuple[Card | None, list[Finding]]:
    """A discrete NVIDIA card; None when neither the driver nor the table says how much memory it
    has."""
    is_slice = gpu.is_mig or _is_slice(gpu.name)
    row = (
        None
        if is_slice
        else table.by_gpu_name(gpu.name, gpu.total_bytes, gpu.derived_bandwidth_gbps)
    )
    memory, findings = _nvidia_memory(gpu, row, is_slice=is_slice)
    if memory is None:
        return None, findings
    bandwidth, warned = _nvidia_bandwidth(gpu, row, is_slice=is_slice)
    findings += warned
    limit, default = gpu.power_limit_w, gpu.default_power_limit_w
    if limit and default and limit < 0.8 * default:
        findings.append(
            Finding(
                "info",
                f"{gpu.name} is limited to {limit:.0f} W of {default:.0f} W: prompts "
                "are "
                "read "
                "slower",
            )
        )
    capability = gpu.compute_capability or (row.compute_capability if row else "")
    return Card(
        gpu.name, memory, bandwidth, row, capability, row.compute_units if row else 0
    ), findings


def _nvidia_memory(
    gpu: NvidiaGpu, row: DeviceRow | None, *, is_slice: bool
) -> tuple[Memory | None, list[Finding]]:
    """By the driver, else by the table where a card of that name has but one size."""
    if gpu.total_bytes is not None:
        # What is free is less than what nobody uses: the driver keeps a part, which `used` holds or
        # not.
        used = gpu.used_bytes if gpu.free_bytes is None else gpu.total_bytes - gpu.free_bytes
        return usable.vram(
            gpu.total_bytes, max(used or 0, 0), gpu.reserved_bytes or 0, "NVIDIA driver (NVML)"
        ), []
    if row is not None and row.memory_gb and row.family != _SLICED:
        memory = replace(
            usable.vram(int(row.memory_gb[0] * GIB), 0, 0, row.source), basis="datasheet"
        )
        return memory, [
            Finding("warning", f"the driver does not say how much memory of {gpu.name} is in use")
        ]
    if is_slice or row is not None:
        told = (
            f"{gpu.name} does not say how much memory is ours: it may be a slice of any size "
            "(MIG, vGPU), so it is not planned with"
        )
        return None, [Finding("warning", told, "say its size: --memory GB")]
    return None, [
        Finding("warning", f"{gpu.name} reports no memory size and is not in the table: not used")
    ]


def beside_nvidia(names: Sequence[str]) -> Finding:
    """Cards of other makers beside those that are used: one engine runs a model, with the devices
    it has kernels for."""
    what = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} here too"
    return Finding(
        "info",
        f"{what}: CUDA leaves it idle, a Vulkan build would use all cards",
        "localllm setup --backend vulkan",
    )


def _is_slice(name: str) -> bool:
    """A MIG device or a vGPU by its name: "A100-SXM4-40GB MIG 3g.20gb", "GRID P40-24Q"."""
    return " MIG " in name or re.search(r"\bGRID\b|\bvGPU\b|-[0-9]{1,3}[QCAB]$", name) is not None


def _nvidia_bandwidth(
    gpu: NvidiaGpu, row: DeviceRow | None, *, is_slice: bool
) -> tuple[Figure | None, list[Finding]]:
    """The table's figure; the driver's clock × width for unknown names, and where the two differ by
    over a tenth."""
    if is_slice:
        return None, [
            Finding(
                "info",
                "a MIG slice has its own memory but shares bandwidth: speed is not estimated",
            )
        ]
    derived = gpu.derived_bandwidth_gbps
    told = (
        Figure(round(derived, 1), "derived", "2 × max memory clock × bus width (NVML)")
        if derived
        else None
    )
    known = row.bandwidth if row else None
    if known and told and abs(told.value - known.value) > 0.1 * known.value:
        message = (
            f"{gpu.name}: the table says {known.value:g} GB/s, its clocks say "
            f"{told.value:g}; "
            "took its clocks"
        )
        return told, [Finding("warning", message)]
    if known is None and told is None:
        return None, [
            Finding(
                "info",
                f"{gpu.name} is not in the table: its bandwidth is unknown, give --bandwidth",
            )
        ]
    return known or told, []


def one_machine(found: Sequence[Card], accelerator: Accelerator, base: Device) -> Device:
    """Discrete cards as one Device, in the order of their PCI addresses, beside the memory of the
    system that is `base`."""
    if len(found) > 1:
        told = (
            f"{len(found)} GPUs: a model that one of them holds runs on the fastest that does; "
            "larger ones are divided by layers"
        )
        base = with_findings(base, [Finding("info", told)])
    host, bandwidth = base.memory, base.bandwidth_gbps
    base = replace(
        base,
        kind="discrete",
        accelerator=accelerator,
        host=host,
        host_bandwidth_gbps=bandwidth,
        cards=(),
    )
    return cards.together(cards.numbered([_with_card(base, card) for card in found]))


def _with_card(base: Device, card: Card) -> Device:
    """`base` with this one card."""
    return replace(
        base,
        name=card.name,
        family=card.row.family if card.row else base.accelerator,
        memory=card.memory,
        bandwidth_gbps=card.bandwidth,
        **(table.facts(card.row) | {"compute_units": card.compute_units}),
        compute_capability=card.compute_capability,
    )
