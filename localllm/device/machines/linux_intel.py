"""Identify Intel's cards and integrated GPUs on Linux from i915, the Vulkan driver or the table."""

from __future__ import annotations

import re
from dataclasses import replace

from localllm.device import parts_table, usable
from localllm.device.machines.common import card_of, one_machine, shared_bandwidth
from localllm.device.machines.linux_system import LinuxSystem, with_system_findings
from localllm.device.parsers import hexadecimal, integer
from localllm.device.parsers.gpus import (
    DRM_CARDS,
    environment,
    pci_folders,
    visible_gpu_indices,
    vulkaninfo,
)
from localllm.device.parts_table import DeviceRow
from localllm.device.types import GIB, Device, Finding, Readings

_INTEL_VENDOR = 0x8086


def identify_intel(readings: Readings, system: LinuxSystem) -> Device | None:
    """Return the machine by its Arc cards, or by an integrated GPU in the table, or None."""
    cards = arc_cards(readings)
    visible_indices = visible_gpu_indices(
        environment(readings).get("GGML_VK_VISIBLE_DEVICES"), [""] * len(cards)
    )
    if visible_indices:
        message = "memory in use on it can't be read without root, so all of it counts as free"
        system = with_system_findings(
            system, [Finding("info", f"{cards[visible_indices[0]].name}: {message}")]
        )
        return one_machine([cards[i] for i in visible_indices], system.base)
    named_rows = [
        parts_table.by_gpu_name(name) for name, _, _ in vulkaninfo(readings.output("vulkaninfo"))
    ]
    listed_rows = [
        _by_pci(readings, folder) for folder in pci_folders(readings, DRM_CARDS, _INTEL_VENDOR)
    ]
    intel_rows = [row for row in (*named_rows, *listed_rows) if row and row.vendor == "Intel"]
    integrated = parts_table.by_cpu(system.cpu.name) or next(iter(intel_rows), None)
    if integrated is None or integrated.vendor != "Intel" or integrated.kind != "unified":
        return None
    note = Finding(
        "info",
        "the driver decides how much RAM this integrated "
        "GPU may map; the available memory is shown",
    )
    return replace(
        system.base,
        name=integrated.name,
        kind="unified",
        accelerator="vulkan",
        family=integrated.family,
        bandwidth_gbps=shared_bandwidth(integrated, system.reported_bandwidth, system.base),
        compute_units=integrated.compute_units,
        match=integrated.name,
        findings=(*system.base.findings, note),
    )


def _by_pci(readings: Readings, folder: str, memory_bytes: int | None = None) -> DeviceRow | None:
    return parts_table.by_pci("8086", _device_id(readings, folder), "", memory_bytes)


def _device_id(readings: Readings, folder: str) -> str:
    return f"{hexadecimal(readings.file(f'{folder}/device')) or 0:04x}"


def arc_cards(readings: Readings) -> list[Device]:
    """Return Intel's discrete cards. Their memory sizes come from i915 or the table."""
    names = [
        name
        for name, kind, vendor in vulkaninfo(readings.output("vulkaninfo"))
        if kind == "discrete" and vendor == _INTEL_VENDOR
    ]
    cards = []
    for folder in pci_folders(readings, DRM_CARDS, _INTEL_VENDOR):
        card = _arc_card(readings, folder, names)
        if card is not None:
            cards.append(card)
    return cards


def _arc_card(readings: Readings, folder: str, names: list[str]) -> Device | None:
    """Return the Device of a card in a sysfs folder.

    The card is found by its PCI id. If it is on its own bus, it may also take the next of the
    `names` that the Vulkan driver has for cards. Returns None if it is not a card, or if its memory
    size is unknown.
    """
    total = integer(readings.file(f"{folder}/lmem_total_bytes")) or None
    row = _by_pci(readings, folder, total)
    name = f"Intel GPU 8086:{_device_id(readings, folder)}"
    if row is not None:
        name = row.name
    elif names and (total or _on_own_bus(readings, folder)):
        name = names.pop(0)
        row = parts_table.by_gpu_name(name, total)
    if row is not None and row.kind != "discrete":
        return None
    if total:
        return card_of("Intel", name, usable.vram(total, 0, 0, "lmem_total_bytes"), row)
    if row is None:
        return None
    memory = usable.vram(int(row.memory_gb[0] * GIB), 0, 0, "the table")
    return card_of("Intel", name, replace(memory, basis="datasheet"), row)


def _on_own_bus(readings: Readings, folder: str) -> bool:
    event = readings.file(f"{folder}/uevent")
    slot = re.search(r"PCI_SLOT_NAME=\S*?([0-9a-f]{2}):[0-9a-f]{2}\.", event, re.I)
    return slot is not None and slot[1] != "00"
