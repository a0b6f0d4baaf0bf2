"""Identify AMD's cards and integrated GPUs on Linux from amdgpu's readings."""

from __future__ import annotations

from dataclasses import replace

from localllm.device import parts_table, usable
from localllm.device.machines.common import card_of, one_machine, shared_bandwidth
from localllm.device.machines.linux_system import LinuxSystem, with_system_findings
from localllm.device.parsers.gpus import (
    AmdGpu,
    amd_gpus,
    environment,
    marketing_name,
    visible_gpu_indices,
)
from localllm.device.parts_table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, Figure, Finding, Readings

# Graphics with two compute units (Raphael and its successors, Mendocino). The CPU cores compute as
# fast.
_DISPLAY_ONLY = ("gfx1036", "gfx1037")


def identify_amd(readings: Readings, system: LinuxSystem) -> Device | None:
    """Return the machine by its cards, or by its integrated GPU, or None without either."""
    gpus = [gpu for gpu in amd_gpus(readings) if gpu.gfx not in _DISPLAY_ONLY]
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        value = environment(readings).get(name)
        visible_indices = visible_gpu_indices(value, [""] * len(gpus))
        if len(visible_indices) < len(gpus):
            reported = f"{name}={value} leaves {len(visible_indices)} of {len(gpus)} AMD GPUs"
            system = with_system_findings(system, [Finding("info", reported)])
            gpus = [gpus[i] for i in visible_indices]
    if not gpus:
        return None
    if readings.output("render-access") == "denied":
        reported = "the GPU was found but this user may not open /dev/dri/renderD* or /dev/kfd"
        fix = "sudo usermod -aG render,video $USER, then log in again"
        system = with_system_findings(system, [Finding("error", reported, fix)])
    card_devices = amd_cards(readings, gpus)
    if not card_devices:
        return _amd_apu(readings, system, gpus)
    return one_machine(card_devices, system.base)


def amd_cards(readings: Readings, gpus: list[AmdGpu]) -> list[Device]:
    """Return the GPUs that have memory of their own, as Devices."""
    return [_amd_card(readings, gpu) for gpu in gpus if not gpu.integrated and gpu.vram_total_bytes]


def amd_pools(readings: Readings, system: LinuxSystem) -> list[str]:
    """Return the integrated GPUs with the memory that each may use ("Radeon 8060S, 120 GiB")."""
    pools = []
    for gpu in amd_gpus(readings):
        if gpu.gfx in _DISPLAY_ONLY or not gpu.integrated or not _usable_bytes(gpu):
            continue
        row = parts_table.by_cpu(system.cpu.name) or _by_pci(gpu)
        pools.append(
            f"{_amd_name(readings, gpu, row)} ({_usable_bytes(gpu) / GIB:.0f} GiB, shared)"
        )
    return pools


def _amd_apu(readings: Readings, system: LinuxSystem, gpus: list[AmdGpu]) -> Device:
    gpu = max(gpus, key=_usable_bytes)
    # The processor's name identifies the SKU.
    row = parts_table.by_cpu(system.cpu.name) or _by_pci(gpu)
    if row is None and gpu.gfx:
        row = next(
            (
                listed_row
                for listed_row in parts_table.rows()
                if listed_row.compute_capability == gpu.gfx
            ),
            None,
        )
    accelerator: Accelerator
    if row is not None and row.accelerator == "rocm":
        accelerator = "rocm"
        memory = usable.rocm_memory(gpu, system.base.memory)
    else:
        accelerator = "vulkan"
        available = system.memory.available_bytes() or 0
        memory = usable.apu(gpu, system.base.memory.total_bytes, available)
    facts = parts_table.device_fields(row)
    facts["compute_units"] = gpu.compute_units or facts["compute_units"]
    return replace(
        system.base,
        name=_amd_name(readings, gpu, row),
        kind="unified",
        accelerator=accelerator,
        family=row.family if row else "APU",
        memory=memory,
        bandwidth_gbps=shared_bandwidth(row, system.reported_bandwidth, system.base),
        **facts,
        compute_capability=gpu.gfx,
        findings=(*system.base.findings, *_gtt_findings(gpu, system)),
    )


def _usable_bytes(gpu: AmdGpu) -> int:
    """Return the bytes that the GPU may use."""
    return gpu.vram_total_bytes + gpu.gtt_total_bytes


def _by_pci(gpu: AmdGpu, memory_bytes: int | None = None) -> DeviceRow | None:
    return parts_table.by_pci("1002", f"{gpu.device_id:04x}", f"{gpu.revision:02x}", memory_bytes)


def _amd_name(readings: Readings, gpu: AmdGpu, row: DeviceRow | None) -> str:
    ids = readings.file("/usr/share/libdrm/amdgpu.ids")
    name = gpu.name or marketing_name(ids, gpu.device_id, gpu.revision)
    if name:
        return name
    if row is not None:
        return row.name
    return f"AMD GPU 1002:{gpu.device_id:04x}"


def _amd_card(readings: Readings, gpu: AmdGpu) -> Device:
    total = gpu.vram_total_bytes
    name = _amd_name(readings, gpu, None)
    row = parts_table.by_gpu_name(name, total) or _by_pci(gpu, total)
    if row is not None and name.startswith("AMD GPU "):
        name = row.name
    memory = usable.vram(total, gpu.vram_used_bytes, 0, "amdgpu mem_info_vram_total/used")
    reported = None
    if gpu.bandwidth_gbps:
        reported = Figure(gpu.bandwidth_gbps, "derived", "amdgpu's clock and width")
    return card_of(
        "AMD",
        name,
        memory,
        row,
        architecture=gpu.gfx,
        compute_units=gpu.compute_units,
        reported=reported,
    )


def _gtt_findings(gpu: AmdGpu, system: LinuxSystem) -> list[Finding]:
    """Return advice if the kernel lets the GPU map much less RAM than there is."""
    findings = []
    installed_bytes = system.machine.total_bytes + gpu.vram_total_bytes
    if _usable_bytes(gpu) < 0.75 * installed_bytes and installed_bytes >= 24 * GIB:
        share = f"{_usable_bytes(gpu) / GIB:.0f} of {installed_bytes / GIB:.0f} GiB"
        message_text = f"the GPU may use {share}: the kernel's GTT limit is small"
        kernel_option = f'"ttm.pages_limit={usable.gtt_pages_advised(installed_bytes)}"'
        fix = (
            f"add {kernel_option} to the kernel command line (GRUB_CMDLINE_LINUX), "
            "update-grub, reboot"
        )
        findings.append(Finding("warning", message_text, fix))
    if gpu.vram_total_bytes > max(16 * GIB, system.machine.total_bytes):
        message = f"the BIOS reserves {gpu.vram_total_bytes / GIB:.0f} GiB permanently for the GPU"
        fix = "set the UMA frame buffer to 512 MB in the BIOS and raise ttm.pages_limit instead"
        findings.append(
            Finding("info", f"{message}; models are loaded through the remaining memory", fix)
        )
    return findings
