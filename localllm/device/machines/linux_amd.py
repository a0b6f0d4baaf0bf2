"""AMD's cards and integrated GPUs on Linux, as amdgpu tells of them."""

from __future__ import annotations

from dataclasses import replace

from localllm.device import table, usable
from localllm.device.machines.common import card_of, one_machine, shared_bandwidth
from localllm.device.machines.linux_system import LinuxSystem, noted
from localllm.device.parsers.gpus import AmdGpu, amd_gpus, environment, marketing_name, visible
from localllm.device.table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, Figure, Finding, Readings

# Graphics of two compute units (Raphael and what came after it, Mendocino): the cores beside them
# compute as much.
_FOR_SCREENS = ("gfx1036", "gfx1037")


def identify_amd(readings: Readings, system: LinuxSystem) -> Device | None:
    """The machine by its cards, else by its integrated GPU; None without either."""
    gpus = [gpu for gpu in amd_gpus(readings) if gpu.gfx not in _FOR_SCREENS]
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        said = environment(readings).get(name)
        left = visible(said, [""] * len(gpus))
        if len(left) < len(gpus):
            told = f"{name}={said} leaves {len(left)} of {len(gpus)} AMD GPUs"
            system = noted(system, [Finding("info", told)])
            gpus = [gpus[i] for i in left]
    if not gpus:
        return None
    if readings.output("render-access") == "denied":
        told = "the GPU is there but this user may not open /dev/dri/renderD* or /dev/kfd"
        system = noted(
            system,
            [Finding("error", told, "sudo usermod -aG render,video $USER, then log in again")],
        )
    found = amd_cards(readings, gpus)
    if not found:
        return _amd_apu(readings, system, gpus)
    return one_machine(found, system.base)


def amd_cards(readings: Readings, gpus: list[AmdGpu]) -> list[Device]:
    """Those of the GPUs that have memory of their own."""
    return [_amd_card(readings, gpu) for gpu in gpus if not gpu.integrated and gpu.vram_total_bytes]


def _amd_apu(readings: Readings, system: LinuxSystem, gpus: list[AmdGpu]) -> Device:
    gpu = max(gpus, key=lambda g: g.vram_total_bytes + g.gtt_total_bytes)
    # The processor's name tells the SKU.
    row = table.by_cpu(system.cpu.name) or table.by_pci(
        "1002", f"{gpu.device_id:04x}", f"{gpu.revision:02x}"
    )
    if row is None and gpu.gfx:
        row = next((r for r in table.rows() if r.compute_capability == gpu.gfx), None)
    memory = usable.apu(gpu, system.base.memory.total_bytes, system.memory.available_bytes() or 0)
    accelerator: Accelerator
    if row is not None and row.accelerator == "rocm":
        accelerator = "rocm"
    else:
        accelerator = "vulkan"
    if accelerator == "rocm":
        memory = usable.rocm_alone(gpu, system.base.memory)
    facts = table.facts(row)
    facts["compute_units"] = gpu.compute_units or facts["compute_units"]
    return replace(
        system.base,
        name=_amd_name(readings, gpu, row),
        kind="unified",
        accelerator=accelerator,
        family=row.family if row else "APU",
        memory=memory,
        bandwidth_gbps=shared_bandwidth(row, system.told_bandwidth, system.base),
        **facts,
        compute_capability=gpu.gfx,
        findings=(*system.base.findings, *_gtt_findings(gpu, system, row)),
    )


def _amd_name(readings: Readings, gpu: AmdGpu, row: DeviceRow | None) -> str:
    listed = marketing_name(
        readings.file("/usr/share/libdrm/amdgpu.ids"), gpu.device_id, gpu.revision
    )
    return gpu.name or listed or (row.name if row else f"AMD GPU 1002:{gpu.device_id:04x}")


def _amd_card(readings: Readings, gpu: AmdGpu) -> Device:
    name = _amd_name(readings, gpu, None)
    row = table.by_gpu_name(name, gpu.vram_total_bytes) or table.by_pci(
        "1002", f"{gpu.device_id:04x}", f"{gpu.revision:02x}", gpu.vram_total_bytes
    )
    memory = usable.vram(
        gpu.vram_total_bytes, gpu.vram_used_bytes, 0, "amdgpu mem_info_vram_total/used"
    )
    if row is not None and name.startswith("AMD GPU "):
        shown = row.name
    else:
        shown = name
    told = gpu.bandwidth_gbps and Figure(gpu.bandwidth_gbps, "derived", "amdgpu's clock and width")
    return card_of(
        "AMD", shown, memory, row, architecture=gpu.gfx, units=gpu.compute_units, told=told or None
    )


def _gtt_findings(gpu: AmdGpu, system: LinuxSystem, row: DeviceRow | None) -> list[Finding]:
    """Advice where the kernel lets the GPU map much less RAM than there is."""
    installed = system.machine.total_bytes + gpu.vram_total_bytes
    reach = gpu.vram_total_bytes + gpu.gtt_total_bytes
    pages = usable.gtt_pages_advised(installed)
    findings = (
        (
            reach < 0.75 * installed and installed >= 24 * GIB,
            Finding(
                "warning",
                f"the GPU may use {reach / GIB:.0f} of {installed / GIB:.0f} GiB: the kernel's "
                "GTT limit is small",
                f'add "ttm.pages_limit={pages}" to the kernel command line (GRUB_CMDLINE_LINUX), '
                "update-grub, reboot",
            ),
        ),
        (
            gpu.vram_total_bytes > max(16 * GIB, system.machine.total_bytes),
            Finding(
                "info",
                f"the BIOS gave {gpu.vram_total_bytes / GIB:.0f} GiB to the GPU for good; models "
                "load through the rest",
                "set the UMA frame buffer to 512 MB in the BIOS and raise ttm.pages_limit instead",
            ),
        ),
    )
    return [finding for is_so, finding in findings if is_so]
