"""A Linux machine's readings to its Device: NVIDIA (discrete or one pool), AMD (discrete or APU), Intel, CPU only."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localllm.device import cpus, table, usable
from localllm.device.machines.common import (
    Card,
    beside_nvidia,
    modules_bandwidth,
    nvidia_card,
    nvidia_gpus,
    one_machine,
    ram_disagrees,
    with_findings,
)
from localllm.device.parsers import hexadecimal, integer, linux
from localllm.device.parsers.gpus import (
    DRM_CARDS,
    AmdGpu,
    NvidiaGpu,
    amd_gpus,
    environment,
    marketing_name,
    pci_folders,
    visible,
    vulkaninfo,
)
from localllm.device.table import DeviceRow
from localllm.device.types import GIB, Accelerator, Device, DeviceUnreadableError, Figure, Finding, Memory, Readings
from localllm.memory.account import shared_pool
from localllm.memory.linux import LinuxMemory, MemInfo

_ONE_POOL_FAMILIES = {"GB10", "N1X", "Jetson"}
_INTEL_VENDOR = 0x8086
# A display controller's PCI class; a GPU without a file that says its class is taken for one.
_DISPLAY = 0x030000


@dataclass(frozen=True, slots=True)
class _System:
    """What every Linux Device starts from: the system's own memory and processor."""

    memory: LinuxMemory
    machine: MemInfo
    cpu: linux.CpuInfo
    told_bandwidth: Figure | None
    base: Device


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """The Device of these readings; raises DeviceUnreadableError without a MemTotal."""
    system = _system(readings, ram_bandwidth)
    gpus, hidden = nvidia_gpus(readings)
    system = _found(system, hidden)
    cards: list[Card] = []
    for gpu in gpus:
        row = _one_pool_row(readings, gpu, system)
        if row is not None or _looks_integrated(readings, gpu, system):
            return _one_pool(readings, system, gpu, row)
        card, findings = nvidia_card(gpu)
        system = _found(system, findings)
        if card is not None:
            cards.append(card)
    if cards:
        return one_machine(cards, "cuda", with_findings(system.base, _others(readings)))
    if not gpus and not hidden:
        board = readings.file("/proc/device-tree/model")
        if "NVIDIA" in board:
            return _one_pool(readings, system, NvidiaGpu(name=board), _jetson_row(readings, board, system))
        if _has_nvidia_gpu(readings):
            system = _found(system, [_no_nvidia_driver(readings)])
    return _amd(readings, system) or _intel(readings, system) or _cpu_only(system)


def _system(readings: Readings, ram_bandwidth: Figure | None) -> _System:
    memory = LinuxMemory(readings.file)
    machine = memory.machine()
    if machine is None:
        raise DeviceUnreadableError("/proc/meminfo has no MemTotal, so the memory of this machine is unknown")
    pool, is_limited = _pool(memory)
    cpu = linux.cpuinfo(readings.file("/proc/cpuinfo"))
    findings = []
    if is_limited:
        message = (
            f"this container may use {pool.total_bytes / GIB:.1f} GiB of the host's {machine.total_bytes / GIB:.1f} GiB"
        )
        findings.append(Finding("info", message, "start it with a larger memory limit (docker run --memory …)"))
    if linux.is_wsl(readings):
        findings.append(
            Finding(
                "info",
                f"WSL sees {machine.total_bytes / GIB:.1f} GiB of this PC's memory (half of it unless told otherwise)",
                "set [wsl2] memory= in %UserProfile%\\.wslconfig, then wsl --shutdown",
            )
        )
    if cpu.apple and "/.dockerenv" in readings.files:
        findings.append(
            Finding("info", "Docker on a Mac has no Metal: models run on the CPU here, run on macOS instead")
        )
    modules = linux.udev_memory(readings.file("/run/udev/data/+dmi:id"), cpus.channels(cpu.name))
    told = modules_bandwidth(modules, "udev", cpu.name)
    findings += ram_disagrees(ram_bandwidth, told)
    base = Device(
        name=cpu.name or f"Linux {readings.architecture}",
        kind="system",
        accelerator="cpu",
        family="CPU",
        memory=pool,
        bandwidth_gbps=ram_bandwidth or told,
        os="Linux (WSL2)" if linux.is_wsl(readings) else "Linux",
        cpu=cpu.name,
        n_cpu_cores=cpu.cores,
        cpu_vectors=cpu.vectors,
        findings=tuple(findings),
    )
    return _System(memory, machine, cpu, told, base)


def _pool(memory: LinuxMemory, huge_free_bytes: int | None = None) -> tuple[Memory, bool]:
    """The account of system memory, and whether a container's limit makes it smaller: /proc/meminfo shows the host's. Where huge
    pages are reserved (`huge_free_bytes`), those alone can hold a model on some boards."""
    smallest = memory.smallest_limit()
    source = "/proc/meminfo MemAvailable" if huge_free_bytes is None else "/proc/meminfo HugePages_Free"
    if smallest is not None:
        source = f"limited by {smallest[1]}"
    available = memory.available_bytes(machine_bytes=huge_free_bytes)
    return shared_pool(memory.total_bytes() or 0, available or 0, source), smallest is not None


def _found(system: _System, findings: list[Finding]) -> _System:
    return replace(system, base=with_findings(system.base, findings))


# -- NVIDIA with one pool: GB10, N1X, Jetson ------------------------------------------------------------------------


def _one_pool_row(readings: Readings, gpu: NvidiaGpu, system: _System) -> DeviceRow | None:
    """The row of a GPU that shares the system's memory, by its name or PCI id; the board decides among siblings."""
    if "10de:2e12" in gpu.name.lower():  # a container without the driver's name table says "Device [10de:2e12]"
        return table.by_gpu_name("NVIDIA GB10")
    row = table.by_gpu_name(gpu.name)
    if row is None or row.family not in _ONE_POOL_FAMILIES:
        return None
    if row.family == "Jetson":
        return _jetson_row(readings, readings.file("/proc/device-tree/model") or gpu.name, system) or row
    if row.family == "GB10":
        return _gb10_row(readings) or row
    return row


def _looks_integrated(readings: Readings, gpu: NvidiaGpu, system: _System) -> bool:
    """True for a part the table does not know that has no memory of its own.

    The table goes first and x86 never qualifies: a 32 GB card beside 32 GB of RAM is not unified memory.
    """
    if table.by_gpu_name(gpu.name) is not None or readings.architecture not in ("aarch64", "arm64"):
        return False
    if gpu.bus_bits is not None:
        return False
    near = gpu.total_bytes is not None and gpu.total_bytes >= 0.9 * system.machine.total_bytes
    return gpu.total_bytes is None or gpu.addressing == "ats" or near


def _gb10_row(readings: Readings) -> DeviceRow | None:
    """The GB10 box by its DMI product name; they differ in name only."""
    words = set(readings.file("/sys/class/dmi/id/product_name").lower().replace("_", " ").replace("-", " ").split())
    boxes = [row for row in table.rows() if row.family == "GB10"]
    best = max(boxes, key=lambda row: len(words & set(row.name.lower().split())))
    return best if words & set(best.name.lower().split()) else None


def _jetson_row(readings: Readings, board: str, system: _System) -> DeviceRow | None:
    """The Jetson module by the board's model, its memory, and for the Orin Nano its power mode."""
    low = board.lower()
    kind = next((k for k in ("orin nano", "orin nx", "agx orin", "thor", "t4000") if k in low), None)
    if kind is None:
        return None
    found = [row for row in table.rows() if row.family == "Jetson" and row.memory_gb and kind in row.name.lower()]
    # A module shows a few per cent less than it has: the smallest size that holds MemTotal.
    fitting = [row for row in found if row.memory_gb[0] * GIB >= system.machine.total_bytes]
    size = min((row.memory_gb[0] for row in fitting), default=0.0)
    fitting = [row for row in fitting if row.memory_gb[0] == size and row.bandwidth_gbps]
    if kind == "orin nano" and len(fitting) > 1:
        faster = "super" in low or "maxn" in readings.file("/var/lib/nvpmodel/status").lower()
        fitting.sort(key=lambda row: ("Super" in row.name) != faster)
    return next(iter(fitting), None)


def _one_pool(readings: Readings, system: _System, gpu: NvidiaGpu, row: DeviceRow | None) -> Device:
    """GPU and CPU share MemTotal; what is free is MemAvailable, page cache included, whatever NVML or CUDA say."""
    findings = []
    bandwidth = row.bandwidth if row else None
    if bandwidth is None:
        findings.append(
            Finding("warning", f"{gpu.name} shares the system's memory and is not in the table: bandwidth unknown")
        )
    if row is not None and row.family == "Jetson":
        findings.append(
            Finding("info", "a Jetson's power mode sets its memory bandwidth: the figure holds in the fastest mode")
        )
    memory = system.base.memory
    if system.machine.huge_free_bytes is not None:
        # Only reserved pages can hold a model here: https://github.com/ggml-org/llama.cpp/pull/17368
        memory, _ = _pool(system.memory, system.machine.huge_free_bytes)
    return replace(
        system.base,
        name=_one_pool_name(readings, row) or gpu.name,
        kind="unified",
        accelerator="cuda",
        memory=memory,
        family=row.family if row else "cuda",
        bandwidth_gbps=bandwidth,
        **table.facts(row),
        compute_capability=gpu.compute_capability or (row.compute_capability if row else ""),
        findings=(*system.base.findings, *findings),
    )


def _one_pool_name(readings: Readings, row: DeviceRow | None) -> str:
    """A Jetson's board, or a GB10 with the box that it is in; "" of any other."""
    if row is not None and row.family == "Jetson":
        return readings.file("/proc/device-tree/model")[:80]
    product = " ".join(readings.file("/sys/class/dmi/id/product_name").replace("_", " ").split())[:60]
    if row is not None and row.family == "GB10":
        return f"NVIDIA GB10 ({product})" if product else "NVIDIA GB10"
    return ""


def _no_nvidia_driver(readings: Readings) -> Finding:
    fix = "sudo ubuntu-drivers install  (or your distribution's NVIDIA driver), then reboot; check with nvidia-smi"
    if linux.is_wsl(readings):
        fix = "install the NVIDIA driver in Windows (not in WSL); check with /usr/lib/wsl/lib/nvidia-smi"
    elif "/.dockerenv" in readings.files:
        fix = "start the container with --gpus all (needs nvidia-container-toolkit on the host)"
    return Finding("error", "an NVIDIA GPU is in this machine but its driver does not answer: it is not used", fix)


# -- AMD ------------------------------------------------------------------------------------------------------------


def _others(readings: Readings) -> list[Finding]:
    names = [card.name for card in (*_amd_cards(readings, amd_gpus(readings)), *_arcs(readings))]
    return [beside_nvidia(names)] if names else []


def _amd(readings: Readings, system: _System) -> Device | None:
    gpus = amd_gpus(readings)
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        said = environment(readings).get(name)
        left = visible(said, [""] * len(gpus))
        if len(left) < len(gpus):
            told = Finding("info", f"{name}={said} leaves {len(left)} of {len(gpus)} AMD GPUs")
            system, gpus = _found(system, [told]), [gpus[i] for i in left]
    if not gpus:
        return None
    system = _found(system, _permission_findings(readings))
    cards = _amd_cards(readings, gpus)
    return one_machine(cards, "rocm", system.base) if cards else _amd_apu(readings, system, gpus)


def _amd_cards(readings: Readings, gpus: list[AmdGpu]) -> list[Card]:
    return [_amd_card(readings, gpu) for gpu in gpus if not gpu.integrated and gpu.vram_total_bytes]


def _amd_apu(readings: Readings, system: _System, gpus: list[AmdGpu]) -> Device:
    gpu = max(gpus, key=lambda g: g.vram_total_bytes + g.gtt_total_bytes)
    row = _apu_row(system.cpu.name, gpu)
    memory = usable.apu(gpu, system.base.memory.total_bytes, system.memory.available_bytes() or 0)
    accelerator: Accelerator = "rocm" if row is not None and row.accelerator == "rocm" else "vulkan"
    if accelerator == "rocm":
        larger = usable.carve_out_alone if gpu.vram_total_bytes >= gpu.gtt_total_bytes else usable.gtt_alone
        memory = larger(gpu, system.base.memory)
    facts = table.facts(row)
    facts["compute_units"] = gpu.compute_units or facts["compute_units"]
    return replace(
        system.base,
        name=_amd_name(readings, gpu, row),
        kind="unified",
        accelerator=accelerator,
        family=row.family if row else "APU",
        memory=memory,
        bandwidth_gbps=_apu_bandwidth(system, row),
        **facts,
        compute_capability=gpu.gfx,
        findings=(*system.base.findings, *_gtt_findings(gpu, system, row)),
    )


def _apu_bandwidth(system: _System, row: DeviceRow | None) -> Figure | None:
    """Soldered memory is the table's; socketed memory is whatever is fitted, so the sticks go first.

    What the CPU's cores measured is a floor of what the GPU gets: only where nothing else is known.
    """
    known = row.bandwidth if row else None
    if row is not None and "Halo" in row.family:
        return known
    return system.told_bandwidth or known or system.base.bandwidth_gbps


def _apu_row(cpu: str, gpu: AmdGpu) -> DeviceRow | None:
    """By the processor's name, which tells the SKU; else by PCI id and revision; else any row of that gfx."""
    row = table.by_cpu(cpu) or table.by_pci("1002", f"{gpu.device_id:04x}", f"{gpu.revision:02x}")
    return row or next((r for r in table.rows() if gpu.gfx and r.compute_capability == gpu.gfx), None)


def _amd_name(readings: Readings, gpu: AmdGpu, row: DeviceRow | None) -> str:
    listed = marketing_name(readings.file("/usr/share/libdrm/amdgpu.ids"), gpu.device_id, gpu.revision)
    return gpu.name or listed or (row.name if row else f"AMD GPU 1002:{gpu.device_id:04x}")


def _amd_card(readings: Readings, gpu: AmdGpu) -> Card:
    name = _amd_name(readings, gpu, None)
    row = table.by_gpu_name(name, gpu.vram_total_bytes) or table.by_pci(
        "1002", f"{gpu.device_id:04x}", f"{gpu.revision:02x}", gpu.vram_total_bytes
    )
    memory = usable.vram(gpu.vram_total_bytes, gpu.vram_used_bytes, 0, "amdgpu mem_info_vram_total/used")
    shown = row.name if row is not None and name.startswith("AMD GPU ") else name
    return Card(shown, memory, row.bandwidth if row else None, row, gpu.gfx, gpu.compute_units)


def _gtt_findings(gpu: AmdGpu, system: _System, row: DeviceRow | None) -> list[Finding]:
    """Advice where the kernel lets the GPU map much less RAM than there is."""
    installed = system.machine.total_bytes + gpu.vram_total_bytes
    reach = gpu.vram_total_bytes + gpu.gtt_total_bytes
    found = []
    if reach < 0.75 * installed and installed >= 24 * GIB:
        pages = usable.gtt_pages_advised(installed)
        found.append(
            Finding(
                "warning",
                f"the GPU may use {reach / GIB:.0f} of {installed / GIB:.0f} GiB: the kernel's GTT limit is small",
                f'add "ttm.pages_limit={pages}" to the kernel command line (GRUB_CMDLINE_LINUX), update-grub, reboot',
            )
        )
    if gpu.vram_total_bytes > 16 * GIB and gpu.vram_total_bytes > system.machine.total_bytes:
        found.append(
            Finding(
                "info",
                f"the BIOS gave {gpu.vram_total_bytes / GIB:.0f} GiB to the GPU for good; models load through the rest",
                "set the UMA frame buffer to 512 MB in the BIOS and raise ttm.pages_limit instead",
            )
        )
    return found


def _permission_findings(readings: Readings) -> list[Finding]:
    if readings.output("render-access") != "denied":
        return []
    fix = "sudo usermod -aG render,video $USER, then log in again"
    return [Finding("error", "the GPU is there but this user may not open /dev/dri/renderD* or /dev/kfd", fix)]


# -- Intel and everything else --------------------------------------------------------------------------------------


def _has_nvidia_gpu(readings: Readings) -> bool:
    folders = [*pci_folders(readings, DRM_CARDS, 0x10DE), *pci_folders(readings, "/sys/bus/pci/devices/*", 0x10DE)]
    classes = [hexadecimal(readings.file(f"{folder}/class")) for folder in folders]
    return any((number or _DISPLAY) >> 16 == _DISPLAY >> 16 for number in classes)


def _intel(readings: Readings, system: _System) -> Device | None:
    """Intel's Arc: discrete cards, and the integrated ones the table knows."""
    cards = _arcs(readings)
    left = visible(environment(readings).get("GGML_VK_VISIBLE_DEVICES"), [""] * len(cards))
    cards = [cards[i] for i in left]
    if cards:
        told = f"{cards[0].name}: memory in use can't be read without root, so all of it counts as free"
        return one_machine(cards, "vulkan", with_findings(system.base, [Finding("info", told)]))
    named = [table.by_gpu_name(gpu.name) for gpu in vulkaninfo(readings.output("vulkaninfo"))]
    listed = [_by_pci(readings, folder) for folder in pci_folders(readings, DRM_CARDS, _INTEL_VENDOR)]
    shown = [row for row in (*named, *listed) if row and row.vendor == "Intel"]
    integrated = table.by_cpu(system.cpu.name) or next(iter(shown), None)
    if integrated is None or integrated.vendor != "Intel" or integrated.kind != "unified":
        return None
    note = Finding("info", "how much RAM this integrated GPU may map depends on its driver: what is available is shown")
    return replace(
        system.base,
        name=integrated.name,
        kind="unified",
        accelerator="vulkan",
        family=integrated.family,
        bandwidth_gbps=_apu_bandwidth(system, integrated),
        compute_units=integrated.compute_units,
        match=integrated.name,
        findings=(*system.base.findings, note),
    )


def _by_pci(readings: Readings, folder: str, memory_bytes: int | None = None) -> DeviceRow | None:
    return table.by_pci("8086", _device_id(readings, folder), "", memory_bytes)


def _device_id(readings: Readings, folder: str) -> str:
    return f"{hexadecimal(readings.file(f'{folder}/device')) or 0:04x}"


def _arcs(readings: Readings) -> list[Card]:
    """Intel's discrete cards, as i915 or the table says their memory."""
    shown = vulkaninfo(readings.output("vulkaninfo"))
    names = [gpu.name for gpu in shown if gpu.vendor_id == _INTEL_VENDOR and gpu.kind == "discrete"]
    cards = [_arc(readings, folder, names) for folder in pci_folders(readings, DRM_CARDS, _INTEL_VENDOR)]
    return [card for card in cards if card is not None]


def _arc(readings: Readings, folder: str, names: list[str]) -> Card | None:
    """A card by its PCI id, else, where it is on a bus of its own, by the next of the `names` that the Vulkan driver has for
    cards; None where it is none, or nobody says how much memory it has."""
    total = integer(readings.file(f"{folder}/lmem_total_bytes")) or 0
    row = _by_pci(readings, folder, total or None)
    name = row.name if row else f"Intel GPU 8086:{_device_id(readings, folder)}"
    if row is None and names and (total or _on_own_bus(readings, folder)):
        name = names.pop(0)
        row = table.by_gpu_name(name, total or None)
    if row is None:
        return Card(name, _arc_memory(total), None, None) if total else None
    if row.kind != "discrete":
        return None
    memory = _arc_memory(total) if total else replace(_arc_memory(int(row.memory_gb[0] * GIB)), basis="datasheet")
    return Card(name, memory, row.bandwidth, row, "", row.compute_units)


def _on_own_bus(readings: Readings, folder: str) -> bool:
    slot = re.search(r"PCI_SLOT_NAME=\S*?([0-9a-f]{2}):[0-9a-f]{2}\.", readings.file(f"{folder}/uevent"), re.I)
    return slot is not None and slot.group(1) != "00"


def _arc_memory(total_bytes: int) -> Memory:
    return usable.vram(total_bytes, 0, 0, "lmem_total_bytes, or the table")


def _cpu_only(system: _System) -> Device:
    row = table.by_cpu(system.cpu.name)
    if system.base.bandwidth_gbps is None:
        hint = "memory bandwidth is not known here yet"
        if system.cpu.hypervisor:
            hint += " (a virtual machine hides its memory)"
        system = _found(system, [Finding("info", hint, "localllm device --measure")])
    return replace(system.base, match=row.name if row else "")
