"""Identify NVIDIA GPUs that share the system's memory: GB10, N1X and Jetson."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.device import parts_table
from localllm.device.parsers.gpus import NvidiaGpu
from localllm.device.parts_table import DeviceRow
from localllm.device.types import GIB, Device, Figure, Finding, Readings

_FAMILIES = {"GB10", "N1X", "Jetson"}
_ARM = ("aarch64", "arm64")


def first_integrated(readings: Readings, gpus: Sequence[NvidiaGpu], base: Device) -> Device | None:
    """Return the machine `base` by the first GPU that shares its memory, or None."""
    total_bytes = base.memory.total_bytes
    for gpu in gpus:
        row = row_of(readings, gpu, total_bytes)
        if row is not None or looks_integrated(readings, gpu, total_bytes):
            return device_with_shared_memory(readings, base, gpu, row)
    return None


def row_of(readings: Readings, gpu: NvidiaGpu, total_bytes: int) -> DeviceRow | None:
    """Return the row of a GPU that shares the system's memory, by its name or PCI id.

    The board and the system's memory (`total_bytes`) decide between Jetson's rows.
    """
    # A container without the driver's name table reports "Device [10de:2e12]".
    if "10de:2e12" in gpu.name.lower():
        return parts_table.by_gpu_name("NVIDIA GB10")
    row = parts_table.by_gpu_name(gpu.name)
    if row is None or row.family not in _FAMILIES:
        return None
    if row.family != "Jetson":
        return row
    board = readings.file("/proc/device-tree/model")
    return jetson_row(readings, board, total_bytes) or _jetson_by_memory(gpu.name, total_bytes)


def looks_integrated(readings: Readings, gpu: NvidiaGpu, total_bytes: int) -> bool:
    """Return True for an unlisted GPU that has no memory of its own.

    GPUs in the table are excluded. x86 machines are excluded too: a 32 GB card with 32 GB of RAM is
    not unified memory.
    """
    if parts_table.by_gpu_name(gpu.name) is not None or readings.architecture.lower() not in _ARM:
        return False
    if gpu.bus_bits is not None:
        return False
    covers_ram = gpu.total_bytes is not None and gpu.total_bytes >= 0.9 * total_bytes
    return gpu.total_bytes is None or gpu.addressing == "ats" or covers_ram


def jetson_row(readings: Readings, board: str, total_bytes: int) -> DeviceRow | None:
    """Return the row of a Jetson module by the model of its `board` and by its memory.

    Two Orin Nanos differ only in their power mode. Returns None for an unknown board.
    """
    board_name = board.lower()
    module = next(
        (
            module_name
            for module_name in ("orin nano", "orin nx", "agx orin", "thor", "t4000")
            if module_name in board_name
        ),
        None,
    )
    if module is None:
        return None
    candidates = _of_memory([row for row in _jetsons() if module in row.name.lower()], total_bytes)
    if module == "orin nano" and len(candidates) > 1:
        is_faster = (
            "super" in board_name or "maxn" in readings.file("/var/lib/nvpmodel/status").lower()
        )
        candidates.sort(key=lambda row: ("Super" in row.name) != is_faster)
    return next(iter(candidates), None)


def _jetsons() -> list[DeviceRow]:
    rows = parts_table.rows()
    return [row for row in rows if row.family == "Jetson" and row.memory_gb and row.bandwidth_gbps]


def _of_memory(rows: list[DeviceRow], total_bytes: int) -> list[DeviceRow]:
    """Return the rows of the smallest memory size that holds `total_bytes`.

    A module reports a few per cent less than its memory.
    """
    large_enough = [row for row in rows if row.memory_gb[0] * GIB >= total_bytes]
    size = min((row.memory_gb[0] for row in large_enough), default=0.0)
    return [row for row in large_enough if row.memory_gb[0] == size]


def _jetson_by_memory(name: str, total_bytes: int) -> DeviceRow | None:
    """Return the slowest Jetson with this driver's name and this memory.

    A container does not show the board, and one driver's name is that of all Orin modules.
    """
    named_rows = [row for row in _jetsons() if parts_table.is_named(row, name)]
    candidates = _of_memory(named_rows, total_bytes)
    return min(candidates, key=lambda row: row.bandwidth().value, default=None)


def device_with_shared_memory(
    readings: Readings, base: Device, gpu: NvidiaGpu, row: DeviceRow | None
) -> Device:
    """Return the Device of a GPU that shares the memory of the system `base` with the CPU."""
    findings = base.findings
    bandwidth = _unknown_pool(gpu.compute_capability)
    family = "cuda"
    capability = gpu.compute_capability
    if row is not None:
        family = row.family
        bandwidth = row.bandwidth()
        capability = capability or row.compute_capability
    if family == "Jetson":
        message = (
            "a Jetson's power mode sets its memory bandwidth; the figure is for the fastest mode"
        )
        findings = (*findings, Finding("info", message))
        if row is not None and not readings.file("/proc/device-tree/model"):
            bandwidth = replace(
                bandwidth,
                basis="assumed",
                source=f"the slowest module with this memory has: {row.name}",
            )
    return replace(
        base,
        name=_name(readings, row) or gpu.name,
        kind="unified",
        accelerator="cuda",
        family=family,
        bandwidth_gbps=bandwidth,
        **parts_table.device_fields(row),
        compute_capability=capability,
        findings=findings,
    )


def _unknown_pool(capability: str) -> Figure:
    """Return an assumed bandwidth for an unlisted GPU that shares the system's memory.

    It is the lowest among such GPUs of the same compute capability, or among all of them.
    """
    pools = [row for row in parts_table.rows() if row.family in _FAMILIES]
    return parts_table.slowest(
        [row for row in pools if row.compute_capability == capability] or pools
    )


def _name(readings: Readings, row: DeviceRow | None) -> str:
    """Return a Jetson's board name, or a GB10 with its product name, or "" for other machines."""
    if row is not None and row.family == "Jetson":
        return readings.file("/proc/device-tree/model")[:80] or row.name
    product = " ".join(readings.file("/sys/class/dmi/id/product_name").replace("_", " ").split())[
        :60
    ]
    if row is not None and row.family == "GB10":
        if product:
            return f"NVIDIA GB10 ({product})"
        return "NVIDIA GB10"
    return ""
