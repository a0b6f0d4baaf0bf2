"""Turn a Linux machine's readings into its Device.

It covers NVIDIA (discrete or unified memory), AMD (discrete or APU), Intel, and machines without a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.device import parts_table
from localllm.device.machines.common import (
    as_processor,
    left_idle,
    no_driver,
    nvidia_cards,
    nvidia_gpus,
    one_machine,
    with_findings,
)
from localllm.device.machines.linux_amd import amd_cards, identify_amd
from localllm.device.machines.linux_intel import arcs, identify_intel
from localllm.device.machines.linux_system import LinuxSystem, noted, read_system, system_pool
from localllm.device.parsers import hexadecimal, linux
from localllm.device.parsers.gpus import DRM_CARDS, NvidiaGpu, amd_gpus, pci_folders
from localllm.device.parts_table import DeviceRow
from localllm.device.types import GIB, Device, Figure, Finding, Readings

_ONE_POOL_FAMILIES = {"GB10", "N1X", "Jetson"}
# A display controller's PCI class. A GPU without a class file counts as one.
_DISPLAY = 0x030000


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """Return the Device of these readings. Raises DeviceUnreadableError without a MemTotal."""
    system = read_system(readings, ram_bandwidth)
    gpus, hidden = nvidia_gpus(readings)
    system = noted(system, hidden)
    for gpu in gpus:
        row = _one_pool_row(readings, gpu, system)
        if row is not None or _looks_integrated(readings, gpu, system):
            return _one_pool(readings, system, gpu, row)
    cards, findings = nvidia_cards(gpus)
    system = noted(system, findings)
    if cards:
        return one_machine(cards, with_findings(system.base, _others(readings)))
    if not gpus and not hidden:
        board = readings.file("/proc/device-tree/model")
        if "NVIDIA" in board:
            return _one_pool(
                readings, system, NvidiaGpu(name=board), _jetson_row(readings, board, system)
            )
        if _has_nvidia_gpu(readings):
            system = noted(system, [no_driver(_driver_fix(readings))])
    found = identify_amd(readings, system) or identify_intel(readings, system)
    return found or as_processor(system.base)


# -- NVIDIA with one pool: GB10, N1X, Jetson -------------------------------------------------------


def _one_pool_row(readings: Readings, gpu: NvidiaGpu, system: LinuxSystem) -> DeviceRow | None:
    """Return the row of a GPU that shares the system's memory, by its name or PCI id.

    The board decides between rows of one family.
    """
    # A container without the driver's name table reports "Device [10de:2e12]".
    if "10de:2e12" in gpu.name.lower():
        return parts_table.by_gpu_name("NVIDIA GB10")
    row = parts_table.by_gpu_name(gpu.name)
    if row is None or row.family not in _ONE_POOL_FAMILIES:
        return None
    board = readings.file("/proc/device-tree/model") or gpu.name
    if row.family == "Jetson":
        return _jetson_row(readings, board, system) or row
    return row


def _looks_integrated(readings: Readings, gpu: NvidiaGpu, system: LinuxSystem) -> bool:
    """Return True for an unlisted GPU that has no memory of its own.

    GPUs in the table are excluded. x86 machines are excluded too: a 32 GB card with 32 GB of RAM is
    not unified memory.
    """
    if parts_table.by_gpu_name(gpu.name) is not None or readings.architecture not in (
        "aarch64",
        "arm64",
    ):
        return False
    if gpu.bus_bits is not None:
        return False
    near = gpu.total_bytes is not None and gpu.total_bytes >= 0.9 * system.machine.total_bytes
    return gpu.total_bytes is None or gpu.addressing == "ats" or near


def _jetson_row(readings: Readings, board: str, system: LinuxSystem) -> DeviceRow | None:
    """Return the row of a Jetson module.

    It is found by the board's model and memory, and for the Orin Nano also by its power mode.
    """
    low = board.lower()
    kind = next(
        (k for k in ("orin nano", "orin nx", "agx orin", "thor", "t4000") if k in low), None
    )
    if kind is None:
        return None
    found = [
        row
        for row in parts_table.rows()
        if row.family == "Jetson" and row.memory_gb and kind in row.name.lower()
    ]
    # A module reports a few per cent less than its memory. The smallest size that holds MemTotal is
    # meant.
    fitting = [row for row in found if row.memory_gb[0] * GIB >= system.machine.total_bytes]
    size = min((row.memory_gb[0] for row in fitting), default=0.0)
    fitting = [row for row in fitting if row.memory_gb[0] == size and row.bandwidth_gbps]
    if kind == "orin nano" and len(fitting) > 1:
        faster = "super" in low or "maxn" in readings.file("/var/lib/nvpmodel/status").lower()
        fitting.sort(key=lambda row: ("Super" in row.name) != faster)
    return next(iter(fitting), None)


def _one_pool(
    readings: Readings, system: LinuxSystem, gpu: NvidiaGpu, row: DeviceRow | None
) -> Device:
    """Return the Device of a GPU that shares MemTotal with the CPU.

    Free memory is MemAvailable, page cache included, regardless of NVML and CUDA.
    """
    findings = system.base.findings
    if row is not None and row.family == "Jetson":
        told = (
            "a Jetson's power mode sets its memory bandwidth: the figure holds in the fastest mode"
        )
        findings = (*findings, Finding("info", told))
    memory = system.base.memory
    if system.machine.huge_free_bytes is not None:
        # Here, only reserved pages can hold a model:
        # https://github.com/ggml-org/llama.cpp/pull/17368
        memory, _ = system_pool(system.memory, system.machine.huge_free_bytes)
    capability = gpu.compute_capability
    if row is None:
        family = "cuda"
        bandwidth = _unknown_pool(capability)
    else:
        family = row.family
        bandwidth = row.bandwidth()
        capability = capability or row.compute_capability
    return replace(
        system.base,
        name=_one_pool_name(readings, row) or gpu.name,
        kind="unified",
        accelerator="cuda",
        memory=memory,
        family=family,
        bandwidth_gbps=bandwidth,
        **parts_table.facts(row),
        compute_capability=capability,
        findings=findings,
    )


def _unknown_pool(capability: str) -> Figure:
    """Return an assumed bandwidth for an unlisted GPU that shares the system's memory.

    It is the lowest among such GPUs of the same compute capability, or among all of them.
    """
    pools = [row for row in parts_table.rows() if row.family in _ONE_POOL_FAMILIES]
    return parts_table.slowest(
        [row for row in pools if row.compute_capability == capability] or pools
    )


def _one_pool_name(readings: Readings, row: DeviceRow | None) -> str:
    """Return a Jetson's board name, or a GB10 with its product name, or "" for other machines."""
    if row is not None and row.family == "Jetson":
        return readings.file("/proc/device-tree/model")[:80]
    product = " ".join(readings.file("/sys/class/dmi/id/product_name").replace("_", " ").split())[
        :60
    ]
    if row is not None and row.family == "GB10":
        if product:
            return f"NVIDIA GB10 ({product})"
        return "NVIDIA GB10"
    return ""


def _driver_fix(readings: Readings) -> str:
    """Return the fix that makes an NVIDIA GPU's driver answer on this system."""
    fixes = (
        (
            linux.is_wsl(readings),
            "install the NVIDIA driver in Windows (not in WSL); check with "
            "/usr/lib/wsl/lib/nvidia-smi",
        ),
        (
            "/.dockerenv" in readings.files,
            "start the container with --gpus all (needs nvidia-container-toolkit on the host)",
        ),
        (
            True,
            "sudo ubuntu-drivers install  (or your distribution's NVIDIA driver), then reboot; "
            "check with nvidia-smi",
        ),
    )
    return next(fix for is_so, fix in fixes if is_so)


# -- everything else -------------------------------------------------------------------------------


def _others(readings: Readings) -> list[Finding]:
    names = [card.name for card in (*amd_cards(readings, amd_gpus(readings)), *arcs(readings))]
    if names:
        return [left_idle(names)]
    return []


def _has_nvidia_gpu(readings: Readings) -> bool:
    folders = [
        *pci_folders(readings, DRM_CARDS, 0x10DE),
        *pci_folders(readings, "/sys/bus/pci/devices/*", 0x10DE),
    ]
    classes = [hexadecimal(readings.file(f"{folder}/class")) for folder in folders]
    return any((number or _DISPLAY) >> 16 == _DISPLAY >> 16 for number in classes)
