"""Build Devices from descriptions: a table row, a processor with memory, or two figures."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import chain

from localllm.device import cards, parts_table, usable
from localllm.device.cpus import USUAL_PROCESSOR, Processor
from localllm.device.name_parser import ParsedName
from localllm.device.parts_table import DeviceRow
from localllm.device.ram import NO_RAM, StatedRam
from localllm.device.types import GIB, Device, Figure, Finding, Memory
from localllm.errors import UsageError
from localllm.memory.account import with_released

# Share of a card's nominal memory that software sees: 31.84 of 32 GiB on an RTX 5090, 79.65 of 80
# GiB on an H100.
_VISIBLE_VRAM_SHARE = 0.995
# GB10: MemTotal is 127600748 kB of 128 GiB. Jetson: 15.3 of 16 GiB on an Orin NX
# (https://github.com/Andyyyy64/whichllm/pull/165).
_VISIBLE_SHARE = {"GB10": 127_600_748 * 1024 / (128 * GIB), "N1X": 0.95, "Jetson": 15.3 / 16}
# Families of cards that drive no screen.
_WITHOUT_SCREENS = ("workstation/datacenter", "Instinct")
# Strix and Gorgon Halo after the kernel's GTT limit is raised as advised: 110 GiB of 128.
_HALO_GTT_SHARE = 110 / 128


@dataclass(slots=True)
class Computer:
    """Parsed description of a computer.

    It holds the machines or cards, the processor, the system memory, and findings from the parsing.
    """

    parts: list[tuple[tuple[DeviceRow, ...], ParsedName]]
    cpu: Processor | None = None
    sockets: int = 1
    ram: StatedRam = NO_RAM
    findings: list[Finding] = field(default_factory=list)

    def add_ram(self, size_gb: float | None, more: StatedRam | None) -> None:
        """Record system memory by its size or by its kind alone."""
        stated = self.ram.with_more(more or NO_RAM)
        self.ram = stated.with_more(StatedRam(size_gb))


def simulate(
    row: DeviceRow,
    size_gb: float | None,
    findings: list[Finding],
    *,
    given_memory: bool = False,
    bandwidth_gbps: float | None = None,
    ram: StatedRam = NO_RAM,
) -> Device:
    """Return the Device for a table row with `size_gb` GiB of memory.

    The Device starts with `findings`, then adds its own.
    """
    if size_gb is None:
        size_gb = 32.0
        findings.append(
            Finding("warning", "its memory size is not in the table; assumed 32 GB", "--memory GB")
        )
    bandwidth = row.bandwidth(ram)
    if bandwidth_gbps is not None:
        bandwidth = Figure(bandwidth_gbps, "given", "--bandwidth")
    if row.chip.startswith("Apple A19"):
        findings.append(Finding("info", "for planning only: localllm does not run on an iPhone"))
    memory, memory_findings = _memory(row, size_gb)
    if given_memory:
        memory = replace(memory, basis="given", source="--memory")
    name = row.name
    if re.findall(r"([0-9.]+)\s?GB", name) != [f"{size_gb:g}"]:
        name += f" {size_gb:g} GB"
    return Device(
        name=name,
        kind=row.kind,
        accelerator=row.accelerator,
        family=row.family,
        memory=memory,
        bandwidth_gbps=bandwidth,
        **parts_table.device_fields(row),
        compute_capability=row.compute_capability,
        simulated=True,
        findings=(*findings, *memory_findings),
        cpu=row.cpu[0] if row.cores and row.cpu else "",
        n_cpu_cores=row.cores,
        cpu_vectors=row.vectors,
    )


def _memory(row: DeviceRow, size_gb: float) -> tuple[Memory, list[Finding]]:
    """Return the memory that an idle machine of this kind offers, and findings on the
    assumptions."""
    installed_bytes = int(size_gb * GIB)
    if row.accelerator == "metal":
        limit_bytes = usable.mac_current(installed_bytes)
        source = "the share of RAM that macOS 26 gives the GPU"
        message = "the GPU's share of RAM is that of macOS 26; macOS 15 gives 2/3 to 3/4"
        return Memory(installed_bytes, limit_bytes, limit_bytes, "assumed", source), [
            Finding("info", message)
        ]
    if row.kind == "discrete":
        visible_bytes = int(installed_bytes * _VISIBLE_VRAM_SHARE)
        source = f"{size_gb:g} GB, of which 99.5 % shows"
        screens = not row.family.startswith(_WITHOUT_SCREENS)
        return usable.described_card(visible_bytes, source, screens=screens), []
    fix = f"ttm.pages_limit={usable.gtt_pages_advised(installed_bytes)}"
    if "Halo" in row.family:
        limit_bytes = int(installed_bytes * _HALO_GTT_SHARE)
        raised = "assumes the GTT limit is raised (Linux gives half by default)"
        source = "GTT raised: 110 of 128 GiB"
        memory = Memory(
            installed_bytes,
            limit_bytes,
            limit_bytes,
            "assumed",
            source,
            installed_bytes - limit_bytes,
        )
        return memory, [Finding("info", raised, fix)]
    if row.vendor == "AMD":
        memory = usable.described_pool(installed_bytes, "half of it for the GPU")
        half = "the system lets the GPU use half of the memory"
        return replace(memory, limit_bytes=installed_bytes // 2), [Finding("info", half, fix)]
    source = "the memory that the system reports, less its reserve"
    if row.family not in _VISIBLE_SHARE:
        return usable.described_pool(installed_bytes, source), []
    visible_bytes = int(installed_bytes * _VISIBLE_SHARE[row.family])
    memory = usable.described_pool(visible_bytes, source, headless=True)
    return replace(memory, basis="datasheet"), []


def device_by_figures(name: str, memory_gb: float, bandwidth_gbps: float) -> Device:
    """Return the Device for a machine that is in no table, described by its two figures.

    It is planned as one pool of system memory.
    """
    memory = usable.described_pool(
        int(memory_gb * GIB), "--memory, less the memory reserved for the system"
    )
    message = (
        f"{name!r} is not in the table, so it is planned "
        "as a CPU with the given figures and four cores"
    )
    return Device(
        name=name,
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=replace(memory, basis="given"),
        bandwidth_gbps=Figure(bandwidth_gbps, "given", "--bandwidth"),
        simulated=True,
        n_cpu_cores=USUAL_PROCESSOR.cores,
        cpu_vectors=USUAL_PROCESSOR.vector,
        findings=(Finding("warning", message),),
    )


def without_card(
    computer: Computer, memory_gb: float | None, bandwidth_gbps: float | None
) -> Device:
    """Return the Device for a computer without a card: its processor and memory."""
    cpu = computer.cpu or USUAL_PROCESSOR
    ram = computer.ram
    findings = list(computer.findings)
    size_gb = memory_gb or ram.size_gb
    if size_gb is None:
        size_gb = 32.0
        findings.append(
            Finding("info", "its memory size was not given; assumed 32 GB", "--memory GB")
        )
    memory = usable.described_pool(
        int(size_gb * GIB), "the given memory, less the memory reserved for the system"
    )
    bandwidth = cpu.bandwidth(ram)
    if bandwidth_gbps is not None:
        bandwidth = Figure(bandwidth_gbps, "given", "--bandwidth")
    return Device(
        name=f"{cpu.name} {size_gb:g} GB",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=replace(memory, basis="given"),
        bandwidth_gbps=bandwidth,
        cpu=cpu.name,
        n_cpu_cores=cpu.cores,
        cpu_vectors=cpu.vector,
        match=cpu.line,
        simulated=True,
        findings=tuple(findings),
    )


def one_computer(devices: list[Device]) -> Device:
    """Combine cards of one or several kinds into one computer.

    Raises UsageError if several devices are given and one is a complete machine, or if their
    accelerators differ.
    """
    for device in devices:
        if device.kind != "discrete" and len(devices) > 1:
            raise UsageError(f"{device.name} is a complete machine, and a plan uses one of them")
    kinds = sorted({device.accelerator for device in devices})
    if len(kinds) > 1:
        raise UsageError(
            f"cards of {' and '.join(kinds)} can't share a "
            "model, because one engine must run on all of them"
        )
    all_cards = list(chain.from_iterable(device.cards or (device,) for device in devices))
    if len(all_cards) == 1:
        return all_cards[0]
    findings = tuple(dict.fromkeys(chain.from_iterable(device.findings for device in devices)))
    # One of the cards drives the screens, but the description does not name it. We assume the last
    # card, which a model would use last.
    all_cards[:-1] = [
        replace(card, memory=with_released(card.memory, card.memory.others_bytes))
        for card in all_cards[:-1]
    ]
    return replace(cards.combined(cards.numbered(all_cards)), findings=findings)


def with_host(device: Device, computer: Computer) -> Device:
    """Return `device` with the processor and the system memory of `computer`."""
    cpu = computer.cpu
    ram = computer.ram
    if cpu is not None:
        device = replace(device, cpu=cpu.name, n_cpu_cores=cpu.cores, cpu_vectors=cpu.vector)
    if cpu is not None and device.kind == "unified":
        device = replace(device, name=f"{cpu.name}: {device.name}")
    if ram.size_gb is None or device.kind != "discrete":
        return device
    size_bytes = int(ram.size_gb * GIB)
    host = usable.described_pool(
        size_bytes, "the given memory, less the memory reserved for the system", device.os
    )
    bandwidth = device.host_bandwidth_gbps
    if bandwidth is None or device.simulated:
        bandwidth = (cpu or USUAL_PROCESSOR).bandwidth(ram)
    return replace(device, host=replace(host, basis="given"), host_bandwidth_gbps=bandwidth)
