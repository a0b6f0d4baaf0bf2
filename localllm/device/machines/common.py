"""Code shared by the systems: discrete cards, host memory and RAM bandwidth."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from localllm.device import cards, cpus, parts_table, usable
from localllm.device.accelerators import KINDS, driving_kind
from localllm.device.parsers.dimms import Ram
from localllm.device.parsers.gpus import (
    NvidiaGpu,
    count_lost,
    environment,
    nvml,
    smi,
    visible_gpu_indices,
)
from localllm.device.parts_table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, Figure, Finding, Memory, Readings

# Preferred accelerator for each vendor's cards, as long as its builds support them.
_OWN_KIND: dict[str, Accelerator] = {"NVIDIA": "cuda", "AMD": "rocm", "Intel": "vulkan"}


def card_of(
    maker: str,
    name: str,
    memory: Memory,
    row: DeviceRow | None,
    *,
    architecture: str = "",
    compute_units: int = 0,
    reported: Figure | None = None,
) -> Device:
    """Return the Device of a single card from vendor `maker`.

    Its bandwidth is the table's figure. If the card's clock and bus width give another value
    (`reported`) that differs by more than 10 %, or if the table has no figure, `reported` is used.
    Without either, the bandwidth is that of similar cards.
    """
    facts = parts_table.device_fields(row)
    facts["compute_units"] = compute_units or facts["compute_units"]
    if row is None:
        kind = _OWN_KIND[maker]
        accelerator = driving_kind(kind, architecture)
        family: str = accelerator
        findings = []
        figure = reported or parts_table.bandwidth_of_similar(
            maker, architecture, memory.total_bytes
        )
        if accelerator != kind:
            label = KINDS[kind].label
            message = f"{label}'s builds no longer have code for {architecture} ({name})"
            findings.append(Finding("info", message, f"localllm setup --backend {accelerator}"))
    else:
        accelerator = row.accelerator
        family = row.family or accelerator
        architecture = architecture or row.compute_capability
        figure, findings = _card_bandwidth(name, row, reported)
    if figure.basis == "assumed":
        assumed = f"{name}: its bandwidth is assumed: {figure.value:g} GB/s; {figure.source}"
        findings.insert(0, Finding("warning", assumed, "--bandwidth GBPS"))
    return Device(
        name=name,
        kind="discrete",
        accelerator=accelerator,
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
    """Return the table's bandwidth, or the derived one if they differ by more than 10 %."""
    listed_figure = row.bandwidth()
    if derived is None or abs(derived.value - listed_figure.value) <= 0.1 * listed_figure.value:
        return listed_figure, []
    figures = f"the table has {listed_figure.value:g} GB/s, the clocks give {derived.value:g}"
    return derived, [Finding("warning", f"{name}: {figures}; the clocks' figure is used")]


# Programs reach 60 to 90 % of the modules' peak bandwidth. If the measured and the derived figure
# differ by this factor or more, one of them is wrong.
_MAX_RATIO = 2.0


def ram_disagrees(measured: Figure | None, reported: Figure | None) -> list[Finding]:
    """Return a finding if the measured bandwidth is far from the modules' peak bandwidth."""
    if measured is None or reported is None:
        return []
    if 1 / _MAX_RATIO <= measured.value / reported.value <= _MAX_RATIO:
        return []
    message = (
        f"memory was measured at {measured.value:,.0f} GB/s, and {reported.source} is "
        f"{reported.value:,.0f} GB/s; the measured figure is used"
    )
    return [Finding("info", message, "localllm device --measure while nothing else runs")]


def modules_bandwidth(modules: Ram | None, source: str) -> Figure | None:
    """Return the bandwidth of the installed memory modules, as listed by `source`.

    Returns None in most virtual machines.
    """
    if modules is None:
        return None
    rate = f"{modules.bus_bits} bit at {modules.megatransfers_s} MT/s"
    basis_text = f"{source}: {modules.modules} module(s), {rate}"
    return Figure(round(modules.bandwidth_gbps, 1), "derived", basis_text)


def ram_bandwidth(
    measured: Figure | None, reported: Figure | None, cpu: str, vectors: str
) -> Figure:
    """Return the bandwidth of system memory.

    The measured figure is used first, then the modules' peak (`reported`), then the usual memory of
    the processor.
    """
    known = measured or reported
    if known is not None:
        return known
    row = parts_table.by_cpu(cpu)
    if row is not None:
        return row.bandwidth()
    return cpus.usual_bandwidth(cpu, vectors)


def shared_bandwidth(row: DeviceRow | None, reported: Figure | None, base: Device) -> Figure:
    """Return the memory bandwidth of integrated graphics.

    The table gives the bandwidth of soldered memory. Socketed memory varies, so the installed
    modules take precedence over the table. The figure measured by the processor's cores is a lower
    bound.
    """
    known = row.bandwidth() if row else base.bandwidth_gbps
    if reported is None or (row is not None and "Halo" in row.family):
        reported = known
    if reported.basis == "assumed" and base.bandwidth_gbps.value > reported.value:
        return base.bandwidth_gbps
    return reported


def with_findings(device: Device, findings: Sequence[Finding]) -> Device:
    return replace(device, findings=(*device.findings, *findings))


def nvidia_gpus(readings: Readings) -> tuple[list[NvidiaGpu], list[Finding]]:
    """Return the NVIDIA GPUs visible to programs started here, and a finding if some are hidden."""
    gpus = nvml(readings.output("nvml")) or smi(readings.output("nvidia-smi"))
    findings = []
    n_lost = count_lost(readings.output("nvidia-smi"))
    if n_lost:
        missing = f"the driver lost {n_lost} NVIDIA GPU(s), which are not used"
        findings.append(Finding("warning", missing, "reboot; check with nvidia-smi"))
    visible_value = environment(readings).get("CUDA_VISIBLE_DEVICES")
    visible_indices = visible_gpu_indices(visible_value, [gpu.uuid for gpu in gpus])
    if len(visible_indices) == len(gpus):
        return gpus, findings
    message_text = (
        f"CUDA_VISIBLE_DEVICES={visible_value} leaves "
        f"{len(visible_indices)} of {len(gpus)} NVIDIA GPUs"
    )
    if environment(readings).get("CUDA_DEVICE_ORDER") == "FASTEST_FIRST":
        message_text += (
            "; with CUDA_DEVICE_ORDER=FASTEST_FIRST its "
            "numbers may mean other GPUs than the planned ones"
        )
    return [gpus[i] for i in visible_indices], [*findings, Finding("info", message_text)]


# Families with cards that can be divided (MIG, vGPU). A card of these that does not report its size
# may be a slice of any size.
_SLICED_FAMILY = "workstation/datacenter"
# Names of MIG devices and vGPUs: "A100-SXM4-40GB MIG 3g.20gb", "GRID P40-24Q".
_SLICE = re.compile(r" MIG |\bGRID\b|\bvGPU\b|-[0-9]{1,3}[QCAB]$")


def nvidia_card(gpu: NvidiaGpu) -> tuple[Device | None, list[Finding]]:
    """Return the Device of a discrete NVIDIA card, and findings.

    The Device is None if neither the driver nor the table gives its memory size.
    """
    is_slice = gpu.is_mig or _SLICE.search(gpu.name) is not None
    derived_gbps = gpu.derived_bandwidth_gbps
    row = None
    if not is_slice:
        row = parts_table.by_gpu_name(gpu.name, gpu.total_bytes, derived_gbps)
    memory, findings = _nvidia_memory(gpu, row, is_slice=is_slice)
    if memory is None:
        return None, findings
    reported = None
    if is_slice:
        reported = _slice_bandwidth(gpu.name, memory.total_bytes)
    elif derived_gbps:
        reported = Figure(
            round(derived_gbps, 1), "derived", "2 × max memory clock × bus width (NVML)"
        )
    limit_w = gpu.power_limit_w
    default_w = gpu.default_power_limit_w
    if limit_w and default_w and limit_w < 0.8 * default_w:
        message = (
            f"{gpu.name} is limited to {limit_w:.0f} W of {default_w:.0f} W, so prefill is slower"
        )
        findings.append(Finding("info", message))
    card = card_of(
        "NVIDIA", gpu.name, memory, row, architecture=gpu.compute_capability, reported=reported
    )
    return card, findings


def nvidia_cards(gpus: Sequence[NvidiaGpu]) -> tuple[list[Device], list[Finding]]:
    """Return the NVIDIA cards that plans can use, and findings on all of them."""
    reported = [nvidia_card(gpu) for gpu in gpus]
    findings = chain.from_iterable(message for _, message in reported)
    return [card for card, _ in reported if card is not None], list(findings)


def no_driver(fix: str) -> Finding:
    reported = "an NVIDIA GPU was found but its driver does not answer, so it is not used"
    return Finding("error", reported, fix)


def as_processor(base: Device) -> Device:
    """Return a machine without an accelerator, with its processor's table row if there is one."""
    row = parts_table.by_cpu(base.cpu)
    if row is None:
        return base
    if row.accelerator == base.accelerator:
        base = replace(base, family=row.family)
    return replace(base, match=row.name)


def _slice_bandwidth(name: str, memory_bytes: int) -> Figure | None:
    """Return a slice's bandwidth: the same share of its card's bandwidth as of its memory."""
    full_card = parts_table.by_gpu_name(re.sub(r" MIG .*|-[0-9]{1,3}[QCAB]$", "", name))
    if full_card is None:
        return None
    share = min(1.0, memory_bytes / (full_card.memory_gb[0] * GIB))
    message = (
        f"a slice has of {full_card.name}'s bandwidth what it has of its memory, unless others read"
    )
    return Figure(round(share * full_card.bandwidth().value, 1), "assumed", message)


def _nvidia_memory(
    gpu: NvidiaGpu, row: DeviceRow | None, *, is_slice: bool
) -> tuple[Memory | None, list[Finding]]:
    """Return the memory by the driver, or by the table if the driver gives no size.

    The table is used only for cards that cannot be slices.
    """
    if gpu.total_bytes is not None:
        # `free` may be less than `total` - `used_bytes`, because the driver keeps a part. NVML's
        # versions differ in whether `used_bytes` includes that part.
        used_bytes = gpu.used_bytes or 0
        if gpu.free_bytes is not None:
            used_bytes = gpu.total_bytes - gpu.free_bytes
        reserved_bytes = gpu.reserved_bytes or 0
        memory = usable.vram(
            gpu.total_bytes, max(used_bytes, 0), reserved_bytes, "NVIDIA driver (NVML)"
        )
        return memory, []
    if row is not None and row.memory_gb and row.family != _SLICED_FAMILY:
        memory = usable.vram(int(row.memory_gb[0] * GIB), 0, 0, row.source)
        reported = f"the driver does not report how much memory of {gpu.name} is in use"
        return replace(memory, basis="datasheet"), [Finding("warning", reported)]
    if is_slice or row is not None:
        reported = (
            f"{gpu.name} does not report the size of its "
            "slice (MIG, vGPU), so it is not used in plans"
        )
        return None, [Finding("warning", reported, "give its size: --memory GB")]
    reported = f"{gpu.name} is not used: it reports no memory size and is not in the table"
    return None, [Finding("warning", reported)]


def unused_cards(names: Sequence[str], accelerator: Accelerator = "cuda") -> Finding:
    """Return a finding on cards that are left unused.

    One engine runs a model, and it uses only the devices it has kernels for.
    """
    idle = f"{KINDS[accelerator].label} does not use it; a Vulkan build would use all cards"
    reported = f"{', '.join(names)} were also found: {idle}"
    if len(names) == 1:
        reported = f"{names[0]} was also found: {idle}"
    return Finding("info", reported, "localllm setup --backend vulkan")


def one_machine(all_cards: Sequence[Device], base: Device) -> Device:
    """Combine discrete cards into one Device in the order of their PCI addresses.

    `base` is the system, whose memory becomes the host memory. One build drives the cards. Cards
    that it cannot drive are left unused.
    """
    bytes_by_kind: Counter[Accelerator] = Counter()
    for card in all_cards:
        bytes_by_kind[card.accelerator] += card.memory.total_bytes
    [(accelerator, _)] = bytes_by_kind.most_common(1)
    used_cards = [card for card in all_cards if card.accelerator == accelerator]
    idle_names = [card.name for card in all_cards if card.accelerator != accelerator]
    findings = list(chain.from_iterable(card.findings for card in all_cards))
    if idle_names:
        findings.append(unused_cards(idle_names, accelerator))
    if len(used_cards) > 1:
        reported = (
            f"{len(used_cards)} GPUs: a model that fits on one runs on the fastest "
            "such GPU; larger "
            "models are split by layers"
        )
        findings.append(Finding("info", reported))
    base = with_findings(base, findings)
    return cards.combined(cards.numbered([_card_in(base, card) for card in used_cards]))


def _card_in(base: Device, card: Device) -> Device:
    """Return a card in the computer `base`.

    If a card's bandwidth is assumed, it is at least that of system memory.
    """
    figure = card.bandwidth_gbps
    system = base.bandwidth_gbps
    if figure.basis == "assumed" and system.value > figure.value:
        figure = replace(figure, value=system.value, source="no less than the system's memory")
    computer_fields = {name: getattr(base, name) for name in _COMPUTER_FIELDS}
    return replace(
        card, bandwidth_gbps=figure, host=base.memory, host_bandwidth_gbps=system, **computer_fields
    )


# Device fields that describe the computer around its accelerator.
_COMPUTER_FIELDS = ("os", "cpu", "n_cpu_cores", "cpu_vectors", "findings")
