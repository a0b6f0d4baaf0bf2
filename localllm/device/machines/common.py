"""What the systems share: discrete NVIDIA cards to one pool, host memory, RAM bandwidth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from localllm.device import cards, cpus, table, usable
from localllm.device.accelerators import KINDS, driver
from localllm.device.parsers.gpus import NvidiaGpu, environment, nvml, smi, visible
from localllm.device.parsers.sticks import Ram
from localllm.device.table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, Figure, Finding, Memory, Readings

# What drives the cards of a maker, as far as its builds have code of them.
_OWN_KIND: dict[str, Accelerator] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "vulkan"}


def card_of(
    maker: str,
    name: str,
    memory: Memory,
    row: DeviceRow | None,
    *,
    architecture: str = "",
    units: int = 0,
    told: Figure | None = None,
) -> Device:
    """A card of a `maker`, by itself. Its bandwidth is the table's figure, or what its clock and width come to
    (`told`) where that is another by a tenth or the table has none, else what cards like it
    have."""
    facts = table.facts(row)
    facts["compute_units"] = units or facts["compute_units"]
    if row is None:
        kind = _OWN_KIND[maker]
        drives = driver(kind, architecture)
        family: str = drives
        findings = []
        figure = told or table.of_like_cards(maker, architecture, memory.total_bytes)
        if drives != kind:
            label = KINDS[kind].label
            lacks = f"{label}'s builds have no code of {architecture} ({name}) any more"
            findings.append(Finding("info", lacks, f"localllm setup --backend {drives}"))
    else:
        drives = row.accelerator
        family = row.family or drives
        architecture = architecture or row.compute_capability
        figure, findings = _card_bandwidth(name, row, told)
    if figure.basis == "assumed":
        assumed = f"{name}: its bandwidth is assumed, {figure.value:g} GB/s; {figure.source}"
        findings.insert(0, Finding("warning", assumed, "--bandwidth GBPS"))
    return Device(
        name=name,
        kind="discrete",
        accelerator=drives,
        family=family,
        memory=memory,
        bandwidth_gbps=figure,
        **facts,
        compute_capability=architecture,
        findings=tuple(findings),
    )


def _card_bandwidth(
    name: str, row: DeviceRow, derived: Figure | None
) -> tuple[Figure, list[Finding]]:
    """The table's bandwidth, unless the card's clock and width come to another by a tenth."""
    listed = row.bandwidth()
    if derived is None or abs(derived.value - listed.value) <= 0.1 * listed.value:
        return listed, []
    figures = f"the table says {listed.value:g} GB/s, its clocks say {derived.value:g}"
    return derived, [Finding("warning", f"{name}: {figures}; took its clocks")]


# Programs read 60 to 90 % of what memory modules are made for; less than half means that one of the
# two figures is wrong.
_DISAGREE = 2.0


def ram_disagrees(measured: Figure | None, told: Figure | None) -> list[Finding]:
    """A finding if the measured bandwidth of system memory is far from the one that its modules are
    made for."""
    if measured is None or told is None:
        return []
    if 1 / _DISAGREE <= measured.value / told.value <= _DISAGREE:
        return []
    said = (
        f"memory was measured at {measured.value:,.0f} GB/s, and {told.source} is "
        f"{told.value:,.0f} GB/s: the measured one counts"
    )
    return [Finding("info", said, "localllm device --measure while nothing else runs")]


def modules_bandwidth(modules: Ram | None, source: str) -> Figure | None:
    """What the fitted memory modules come to, as `source` lists them; None in most virtual
    machines."""
    if modules is None:
        return None
    rate = f"{modules.bus_bits} bit at {modules.megatransfers_s} MT/s"
    told = f"{source}: {modules.modules} module(s), {rate}"
    return Figure(round(modules.bandwidth_gbps, 1), "derived", told)


def ram_bandwidth(measured: Figure | None, told: Figure | None, cpu: str, vectors: str) -> Figure:
    """The system memory's: as measured, else as its modules are made (`told`), else as goes with
    the processor."""
    known = measured or told
    if known is not None:
        return known
    row = table.by_cpu(cpu)
    if row is not None:
        return row.bandwidth()
    return cpus.usual_bandwidth(cpu, vectors)


def shared_bandwidth(row: DeviceRow | None, told: Figure | None, base: Device) -> Figure:
    """Of graphics in a processor: soldered memory is the table's; socketed memory is whatever is
    fitted, so the modules go first. What the processor's cores measured is a floor."""
    known = row.bandwidth() if row else base.bandwidth_gbps
    if told is None or (row is not None and "Halo" in row.family):
        told = known
    if told.basis == "assumed" and base.bandwidth_gbps.value > told.value:
        return base.bandwidth_gbps
    return told


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
            "; with CUDA_DEVICE_ORDER=FASTEST_FIRST it may mean others "
            "than the ones that are planned with"
        )
    return [gpus[i] for i in left], [Finding("info", told)]


# Families whose cards are cut into slices (MIG, vGPU): one that does not say its size may be a
# slice of any.
_SLICED = "workstation/datacenter"
# A MIG device or a vGPU by its name: "A100-SXM4-40GB MIG 3g.20gb", "GRID P40-24Q".
_SLICE = re.compile(r" MIG |\bGRID\b|\bvGPU\b|-[0-9]{1,3}[QCAB]$")


def nvidia_card(gpu: NvidiaGpu) -> tuple[Device | None, list[Finding]]:
    """A discrete NVIDIA card; None when neither the driver nor the table says how much memory it
    has."""
    is_slice = gpu.is_mig or _SLICE.search(gpu.name) is not None
    derived = gpu.derived_bandwidth_gbps
    row = None
    if not is_slice:
        row = table.by_gpu_name(gpu.name, gpu.total_bytes, derived)
    memory, findings = _nvidia_memory(gpu, row, is_slice=is_slice)
    if memory is None:
        return None, findings
    told = None
    if is_slice:
        told = _share_of_whole(gpu.name, memory.total_bytes)
    elif derived:
        told = Figure(round(derived, 1), "derived", "2 × max memory clock × bus width (NVML)")
    limit = gpu.power_limit_w
    default = gpu.default_power_limit_w
    if limit and default and limit < 0.8 * default:
        said = f"{gpu.name} is limited to {limit:.0f} W of {default:.0f} W: prompts are read slower"
        findings.append(Finding("info", said))
    card = card_of("NVIDIA", gpu.name, memory, row, architecture=gpu.compute_capability, told=told)
    return card, findings


def nvidia_cards(gpus: Sequence[NvidiaGpu]) -> tuple[list[Device], list[Finding]]:
    """The NVIDIA cards that can be planned with, and what there is to say of the others."""
    told = [nvidia_card(gpu) for gpu in gpus]
    findings = chain.from_iterable(said for _, said in told)
    return [card for card, _ in told if card is not None], list(findings)


def no_driver(fix: str) -> Finding:
    told = "an NVIDIA GPU is in this machine but its driver does not answer: it is not used"
    return Finding("error", told, fix)


def as_processor(base: Device) -> Device:
    """A machine without an accelerator, with the row of its processor if the table has it."""
    row = table.by_cpu(base.cpu)
    if row is None:
        return base
    if row.accelerator == base.accelerator:
        base = replace(base, family=row.family)
    return replace(base, match=row.name)


def _share_of_whole(name: str, memory_bytes: int) -> Figure | None:
    """What a slice has of its card's bandwidth: as much as of its memory."""
    whole = table.by_gpu_name(re.sub(r" MIG .*|-[0-9]{1,3}[QCAB]$", "", name))
    if whole is None:
        return None
    share = min(1.0, memory_bytes / (whole.memory_gb[0] * GIB))
    said = f"a slice has of {whole.name}'s bandwidth what it has of its memory, unless others read"
    return Figure(round(share * whole.bandwidth().value, 1), "assumed", said)


def _nvidia_memory(
    gpu: NvidiaGpu, row: DeviceRow | None, *, is_slice: bool
) -> tuple[Memory | None, list[Finding]]:
    """By the driver, else by the table where a card of that name has but one size."""
    if gpu.total_bytes is not None:
        # What is free is less than what nobody uses: the driver keeps a part, which `used` holds or
        # not.
        used = gpu.used_bytes or 0
        if gpu.free_bytes is not None:
            used = gpu.total_bytes - gpu.free_bytes
        reserved = gpu.reserved_bytes or 0
        memory = usable.vram(gpu.total_bytes, max(used, 0), reserved, "NVIDIA driver (NVML)")
        return memory, []
    if row is not None and row.memory_gb and row.family != _SLICED:
        memory = usable.vram(int(row.memory_gb[0] * GIB), 0, 0, row.source)
        told = f"the driver does not say how much memory of {gpu.name} is in use"
        return replace(memory, basis="datasheet"), [Finding("warning", told)]
    if is_slice or row is not None:
        told = (
            f"{gpu.name} does not say how much memory is ours: it may be a slice of any size "
            "(MIG, vGPU), so it is not planned with"
        )
        return None, [Finding("warning", told, "say its size: --memory GB")]
    told = f"{gpu.name} reports no memory size and is not in the table: not used"
    return None, [Finding("warning", told)]


def left_idle(names: Sequence[str], accelerator: Accelerator = "cuda") -> Finding:
    """Cards beside those that are used: one engine runs a model, with the devices it has kernels
    for."""
    idle = f"{KINDS[accelerator].label} leaves it idle, a Vulkan build would use all cards"
    told = f"{', '.join(names)} are here too: {idle}"
    if len(names) == 1:
        told = f"{names[0]} is here too: {idle}"
    return Finding("info", told, "localllm setup --backend vulkan")


def one_machine(found: Sequence[Device], base: Device) -> Device:
    """Discrete cards as one Device, in the order of their PCI addresses, beside the memory of the
    system that is `base`. One build drives them: what it has no code of is left idle."""
    rooms: Counter[Accelerator] = Counter()
    for card in found:
        rooms[card.accelerator] += card.memory.total_bytes
    [(accelerator, _)] = rooms.most_common(1)
    used = [card for card in found if card.accelerator == accelerator]
    idle = [card.name for card in found if card.accelerator != accelerator]
    findings = list(chain.from_iterable(card.findings for card in found))
    if idle:
        findings.append(left_idle(idle, accelerator))
    if len(used) > 1:
        told = (
            f"{len(used)} GPUs: a model that one of them holds runs on the fastest that does; "
            "larger ones are divided by layers"
        )
        findings.append(Finding("info", told))
    base = with_findings(base, findings)
    return cards.together(cards.numbered([_beside(base, card) for card in used]))


def _beside(base: Device, card: Device) -> Device:
    """A card in the computer `base`; it is no slower than the system's memory only for want of
    knowledge."""
    figure = card.bandwidth_gbps
    system = base.bandwidth_gbps
    if figure.basis == "assumed" and system.value > figure.value:
        figure = replace(figure, value=system.value, source="no less than the system's memory")
    around = {name: getattr(base, name) for name in _OF_COMPUTER}
    return replace(
        card, bandwidth_gbps=figure, host=base.memory, host_bandwidth_gbps=system, **around
    )


# What a Device says of the computer around its accelerator.
_OF_COMPUTER = ("os", "cpu", "n_cpu_cores", "cpu_vectors", "findings")
