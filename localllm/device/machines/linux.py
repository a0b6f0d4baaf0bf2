"""Turn a Linux machine's readings into its Device.

It covers NVIDIA (discrete or unified memory), AMD (discrete or APU), Intel, and machines without a
GPU.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.device.machines import one_pool
from localllm.device.machines.common import (
    as_processor,
    no_driver,
    nvidia_cards,
    nvidia_gpus,
    one_machine,
    unused_cards,
    with_findings,
)
from localllm.device.machines.linux_amd import amd_cards, amd_pools, identify_amd
from localllm.device.machines.linux_intel import arc_cards, identify_intel
from localllm.device.machines.linux_system import (
    LinuxSystem,
    read_system,
    system_pool,
    with_system_findings,
)
from localllm.device.parsers import hexadecimal, linux
from localllm.device.parsers.gpus import DRM_CARDS, NvidiaGpu, amd_gpus, pci_folders
from localllm.device.parts_table import DeviceRow
from localllm.device.types import Device, Figure, Finding, Readings

# A display controller's PCI class. A GPU without a class file counts as one.
_DISPLAY = 0x030000


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """Return the Device of these readings. Raises DeviceUnreadableError without a MemTotal."""
    system = read_system(readings, ram_bandwidth)
    gpus, hidden_findings = nvidia_gpus(readings)
    system = with_system_findings(system, hidden_findings)
    for gpu in gpus:
        total = system.machine.total_bytes
        row = one_pool.row_of(readings, gpu, total)
        if row is not None or one_pool.looks_integrated(readings, gpu, total):
            return _one_pool(readings, system, gpu, row)
    cards, findings = nvidia_cards(gpus)
    system = with_system_findings(system, findings)
    if cards:
        return one_machine(cards, with_findings(system.base, _other_findings(readings, system)))
    if not gpus and not hidden_findings:
        board = readings.file("/proc/device-tree/model")
        if "NVIDIA" in board:
            row = one_pool.jetson_row(readings, board, system.machine.total_bytes)
            return _one_pool(readings, system, NvidiaGpu(name=board), row)
        if _has_nvidia_gpu(readings):
            system = with_system_findings(system, [no_driver(_driver_fix(readings))])
    amd_or_intel = identify_amd(readings, system) or identify_intel(readings, system)
    return amd_or_intel or as_processor(system.base)


def _one_pool(
    readings: Readings, system: LinuxSystem, gpu: NvidiaGpu, row: DeviceRow | None
) -> Device:
    """Return the Device of a GPU that shares MemTotal with the CPU.

    Free memory is MemAvailable, page cache included, regardless of NVML and CUDA.
    """
    base = system.base
    if system.machine.huge_free_bytes is not None:
        # Here, only reserved pages can hold a model:
        # https://github.com/ggml-org/llama.cpp/pull/17368
        memory, _ = system_pool(system.memory, system.machine.huge_free_bytes)
        base = replace(base, memory=memory)
    return one_pool.device_with_shared_memory(readings, base, gpu, row)


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
    return next(fix for applies, fix in fixes if applies)


def _other_findings(readings: Readings, system: LinuxSystem) -> list[Finding]:
    """Return a finding on the GPUs that CUDA does not use."""
    names = [card.name for card in (*amd_cards(readings, amd_gpus(readings)), *arc_cards(readings))]
    names += amd_pools(readings, system)
    if names:
        return [unused_cards(names)]
    return []


def _has_nvidia_gpu(readings: Readings) -> bool:
    folders = [
        *pci_folders(readings, DRM_CARDS, 0x10DE),
        *pci_folders(readings, "/sys/bus/pci/devices/*", 0x10DE),
    ]
    classes = [hexadecimal(readings.file(f"{folder}/class")) for folder in folders]
    return any((number or _DISPLAY) >> 16 == _DISPLAY >> 16 for number in classes)
