"""Parse GPU facts from NVML, nvidia-smi, amdgpu's sysfs, KFD and vulkaninfo.

Facts are memory in bytes, PCI identity and compute units.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.device.parsers import decimal, from_json, hexadecimal, integer, key_values
from localllm.device.types import Readings

AMD_VENDOR = 0x1002

# Integrated Radeons (device id → gfx). Ids are from
# https://gitlab.freedesktop.org/mesa/libdrm/-/blob/main/data/amdgpu.ids, and gfx names from
# https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html.
APU_DEVICES = {
    0x1586: "gfx1151", 0x150E: "gfx1150", 0x1114: "gfx1152", 0x15BF: "gfx1103", 0x15C8: "gfx1103",
    0x1900: "gfx1103", 0x1901: "gfx1103", 0x1681: "gfx1035", 0x164E: "gfx1036", 0x1506: "gfx1037",
    0x163F: "gfx1033", 0x1435: "gfx1033", 0x1638: "gfx90c", 0x1636: "gfx90c", 0x15D8: "gfx902",
    0x15DD: "gfx902",
    0x13C0: "gfx1036", 0x164D: "gfx1035", 0x164C: "gfx90c", 0x15E7: "gfx90c", 0x13FE: "gfx1013",
    0x143F: "gfx1013",
    0x1902: "gfx1103", 0x1903: "gfx1103", 0x98E4: "gfx810", 0x9874: "gfx801",
}  # fmt: skip
_APU_GFX = set(APU_DEVICES.values())


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """One AMD GPU. Sizes are in bytes, and ids are numbers.

    `gfx` is, for example, "gfx1151" ("" = unknown). 0 compute units mean unknown.
    """

    device_id: int
    revision: int
    name: str
    vram_total_bytes: int
    vram_used_bytes: int
    gtt_total_bytes: int
    gtt_used_bytes: int
    gfx: str
    integrated: bool
    compute_units: int = 0
    bandwidth_gbps: float = 0.0


# Transfers per memory clock as amdgpu counts it, by prefix of the architecture: HBM3 on Instincts
# from the 300 series on, GDDR5, HBM2, and GDDR6 on every Radeon since. Examples (MHz, bits, GB/s):
# RX 6800 XT 1000, 256, 512; RX 580 2000, 256, 256; MI50 1000, 4096, 1024.
_TRANSFERS_PER_CLOCK = {"gfx94": 4, "gfx95": 4, "gfx8": 4, "gfx9": 2, "gfx1": 16}


def _kfd_values(text: str) -> dict[str, int]:
    return {key: integer(value) or 0 for key, value in key_values(text, " ").items()}


def kfd_nodes(readings: Readings) -> dict[int, dict[str, Any]]:
    """Return `AmdGpu` fields from the GPU nodes of /sys/class/kfd, by PCI device id.

    A CPU node has no SIMDs. gfx_target_version is major × 10000 + minor × 100 + step. RDNA has two
    SIMD32 per CU, GCN/CDNA four.
    """
    nodes: dict[int, dict[str, Any]] = {}
    for path in readings.matching("/sys/class/kfd/kfd/topology/nodes/*/properties"):
        properties = _kfd_values(readings.file(path))
        simds = properties.get("simd_count", 0)
        version = properties.get("gfx_target_version", 0)
        if simds <= 0 or not 0 < version < 1_000_000:
            continue
        major = version // 10000
        minor = version // 100 % 100
        step = version % 100
        gfx = f"gfx{major}{minor:x}{step:x}"
        simds_per_unit = 2 if major >= 10 else 4
        bank = _kfd_values(readings.file(path.replace("/properties", "/mem_banks/0/properties")))
        node = {
            "gfx": gfx,
            "compute_units": simds // simds_per_unit,
            "bandwidth_gbps": _bank_gbps(bank, gfx),
        }
        nodes.setdefault(properties.get("device_id", 0), node)
    return nodes


def _bank_gbps(bank: Mapping[str, int], gfx: str) -> float:
    """Return the GB/s of a memory bank, or 0.0 if it is unknown or implausible."""
    transfers = next(
        (factor for prefix, factor in _TRANSFERS_PER_CLOCK.items() if gfx.startswith(prefix)), 0
    )
    gbps = bank.get("width", 0) / 8 * bank.get("mem_clk_max", 0) * transfers / 1000
    return gbps if 10 <= gbps <= 50_000 else 0.0


DRM_CARDS = "/sys/class/drm/card*/device"


def pci_folders(readings: Readings, pattern: str, vendor: int) -> list[str]:
    """Return the sysfs folders that match the pattern and belong to a vendor's devices."""
    return [
        path.removesuffix("/vendor")
        for path in readings.matching(f"{pattern}/vendor")
        if hexadecimal(readings.file(path)) == vendor
    ]


def amd_gpus(readings: Readings) -> list[AmdGpu]:
    """Return every amdgpu card of /sys/class/drm, joined with its KFD node by PCI device id."""
    nodes = kfd_nodes(readings)
    gpus = []
    for folder in pci_folders(readings, DRM_CARDS, AMD_VENDOR):
        device_id = hexadecimal(readings.file(f"{folder}/device")) or 0
        node = nodes.get(device_id) or {"gfx": APU_DEVICES.get(device_id, "")}
        name = readings.file(f"{folder}/product_name")
        gpu = AmdGpu(
            device_id=device_id,
            revision=hexadecimal(readings.file(f"{folder}/revision")) or 0,
            name=" ".join(name.split())[:120],
            vram_total_bytes=_memory_info(readings, folder, "vram_total"),
            vram_used_bytes=_memory_info(readings, folder, "vram_used"),
            gtt_total_bytes=_memory_info(readings, folder, "gtt_total"),
            gtt_used_bytes=_memory_info(readings, folder, "gtt_used"),
            integrated=_is_integrated(readings, folder, device_id, node["gfx"]),
            **node,
        )
        if gpu.vram_total_bytes or gpu.gtt_total_bytes:
            gpus.append(gpu)
    return gpus


def _memory_info(readings: Readings, folder: str, name: str) -> int:
    """Return the bytes that amdgpu reports in a card's folder, or 0 without a report."""
    return max(integer(readings.file(f"{folder}/mem_info_{name}")) or 0, 0)


def _is_integrated(readings: Readings, folder: str, device_id: int, gfx: str) -> bool:
    """Return True for an APU, by its PCI id or gfx.

    The size of the carve-out is no criterion, because a BIOS can give the GPU 96 GB. Only cards
    with their own memory chips have board_info and a vendor's name in mem_info_vram_vendor
    ("unknown" on an APU). No card has less than a GiB of its own memory and more than a GiB of GTT.
    """
    vram_bytes = integer(readings.file(f"{folder}/mem_info_vram_total")) or 0
    gtt_bytes = integer(readings.file(f"{folder}/mem_info_gtt_total")) or 0
    if device_id in APU_DEVICES or gfx in _APU_GFX or vram_bytes < 1 << 30 < gtt_bytes:
        return True
    chips = readings.file(f"{folder}/mem_info_vram_vendor")
    if f"{folder}/board_info" in readings.files or chips not in ("", "unknown"):
        return False
    return vram_bytes <= 4 << 30 and gtt_bytes >= 4 * max(vram_bytes, 1 << 30)


def marketing_name(ids_file: str, device_id: int, revision: int) -> str:
    """Return the product name from libdrm's amdgpu.ids, or "".

    A line is "744C,\\tC8,\\tAMD Radeon RX 7900 XTX".
    """
    for line in ids_file.splitlines():
        parts = line.split(",", 2)
        if len(parts) != 3:
            continue
        device, row_revision, name = parts
        if hexadecimal(device) == device_id and hexadecimal(row_revision) == revision:
            return name.strip()
    return ""


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """One NVIDIA GPU. Sizes are in bytes, clocks in MHz.

    A field is None if the driver reported N/A, NOT_SUPPORTED or no value.

    - `is_mig`: divided into MIG slices, of which a program gets one. Sizes are then that slice's.
    - `addressing`: "none", "hmm", "ats" or "". ATS means that CPU and GPU share page tables (GB10,
      Thor, Grace).
    """

    name: str
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    compute_capability: str = ""
    bus_bits: int | None = None
    max_memory_mhz: int | None = None
    addressing: str = ""
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    uuid: str = ""
    is_mig: bool = False

    @property
    def derived_bandwidth_gbps(self) -> float | None:
        """2 × maximum memory clock × bus width ÷ 8, in decimal GB/s.

        The factor 2 is the double data rate on the clock that NVML reports. The result agrees with
        the datasheets of RTX 4090 (10501 MHz × 384 bit → 1008) and 5090 (14001 × 512 → 1792).
        """
        if not self.bus_bits or not self.max_memory_mhz:
            return None
        value = 2 * self.max_memory_mhz * self.bus_bits / 8 / 1000
        if 10 <= value <= 50_000:
            return value
        return None


def nvml(text: str) -> list[NvidiaGpu]:
    """Parse the NVML probe's JSON: one object per GPU.

    A field is absent if its NVML call raised.
    """
    entries = from_json(text)
    if not isinstance(entries, list):
        return []
    return [
        _nvml_gpu(entry)
        for entry in entries
        if isinstance(entry, dict) and isinstance(entry.get("name"), str)
    ]


def _number_or_none(entry: Mapping[str, Any], key: str) -> int | None:
    value = entry.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62:
        return value
    return None


def _watts(entry: Mapping[str, Any], key: str) -> float | None:
    milliwatts = _number_or_none(entry, key)
    if milliwatts is None:
        return None
    return milliwatts / 1000


# Page-table sharing by NVML's addressing mode.
_ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}


def _nvml_gpu(entry: Mapping[str, Any]) -> NvidiaGpu:
    name = str(entry["name"])
    gpu = NvidiaGpu(
        name=" ".join(name.split())[:120],
        compute_capability=_capability(entry),
        bus_bits=_number_or_none(entry, "bus_bits") or None,
        max_memory_mhz=_number_or_none(entry, "max_memory_mhz") or None,
        addressing=_addressing(entry),
        power_limit_w=_watts(entry, "power_limit_mw"),
        default_power_limit_w=_watts(entry, "default_power_limit_mw"),
        uuid=str(entry.get("uuid") or "")[:80],
    )
    if _number_or_none(entry, "mig") == 1:
        return replace(gpu, is_mig=True, total_bytes=_slice_bytes(entry))
    return replace(
        gpu,
        total_bytes=_number_or_none(entry, "total") or None,
        used_bytes=_number_or_none(entry, "used"),
        free_bytes=_number_or_none(entry, "free"),
        reserved_bytes=_number_or_none(entry, "reserved"),
    )


def _capability(entry: Mapping[str, Any]) -> str:
    major = _number_or_none(entry, "cc_major")
    minor = _number_or_none(entry, "cc_minor")
    if major is None or minor is None:
        return ""
    return f"{major}.{minor}"


def _addressing(entry: Mapping[str, Any]) -> str:
    if "addressing" not in entry:
        return ""
    return _ADDRESSING_MODES.get(_number_or_none(entry, "addressing") or 0, "")


def _slice_bytes(entry: Mapping[str, Any]) -> int | None:
    """Return the bytes of the MIG slice that a program gets: the first in the list."""
    slices = entry.get("slices")
    if not isinstance(slices, list):
        return None
    return next((size for size in slices if isinstance(size, int) and size > 0), None)


def environment(readings: Readings) -> dict[str, str]:
    """Return the environment variables that select GPUs, as recorded by the probe."""
    return key_values(readings.output("environment"), "=")


def visible_gpu_indices(value: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the indices of the GPUs selected by a list such as "0,GPU-8a2f", in ascending order.

    `uuids` are the GPUs' ids in the order of PCI addresses. None selects all. As in CUDA, an
    invalid entry ends the list, and a list that repeats a GPU selects no GPU.
    """
    if value is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for word in (word.strip() for word in value.split(",")):
        matching = _matching_gpus(word, uuids)
        if len(matching) != 1:
            break
        if matching[0] in indices:
            return []
        indices.append(matching[0])
    return sorted(indices)


def _matching_gpus(word: str, uuids: Sequence[str]) -> list[int]:
    """Return the GPUs that match an index, an id or the beginning of an id."""
    if word.isdecimal() and int(word) < len(uuids):
        return [int(word)]
    parent = word
    if word.startswith("MIG-GPU-"):
        parent = word.removeprefix("MIG-")
    if len(parent) <= 4 or not parent.startswith(("GPU-", "MIG-")):
        return []
    return [i for i, uuid in enumerate(uuids) if uuid and _same_start(uuid, parent)]


def _same_start(first: str, second: str) -> bool:
    return first.startswith(second) or second.startswith(first)


# Column names in nvidia-smi's CSV header, documented by --help-query-gpu.
SMI_FIELDS = (
    "name,uuid,memory.total,memory.used,memory.free,compute_cap,clocks.max.memory,power.limit"
)


def smi(text: str) -> list[NvidiaGpu]:
    """Parse `nvidia-smi --query-gpu=… --format=csv` with its header line and any columns.

    "[N/A]", "[Not Supported]" and errors in place of a number mean unknown. A GPU that is lost to the
    driver can't be used, so it is left out.
    """
    lines = iter([line for line in text.splitlines() if line.strip()])
    header_line = next(
        (line for line in lines if re.search(r"(?:^|,)\s*name\s*(?:,|$)", line)), None
    )
    if header_line is None:
        return []
    import csv

    header = [cell.split("[")[0].strip() for cell in header_line.split(",")]
    gpus = []
    try:
        for line in csv.reader(lines, skipinitialspace=True):
            cells = [cell.strip() for cell in line]
            if len(cells) != len(header):
                continue
            row = dict(zip(header, cells, strict=True))
            is_lost = any("gpu is lost" in cell.lower() for cell in cells)
            if row.get("name") and not is_lost:
                gpus.append(_smi_gpu(row))
    except csv.Error:
        pass
    return gpus


def _smi_gpu(row: Mapping[str, str]) -> NvidiaGpu:
    capability = row.get("compute_cap", "")
    if decimal(capability) is None:
        capability = ""
    clock = row.get("clocks.max.memory") or row.get("clocks.max.mem")
    return NvidiaGpu(
        name=row["name"][:120],
        uuid=row.get("uuid", "")[:80],
        total_bytes=_mib(row.get("memory.total")) or None,
        used_bytes=_mib(row.get("memory.used")),
        free_bytes=_mib(row.get("memory.free")),
        compute_capability=capability,
        max_memory_mhz=integer(clock),
        power_limit_w=decimal(row.get("power.limit")),
    )


def _mib(text: str | None) -> int | None:
    number = integer(text)
    if number is None or number < 0:
        return None
    return number * MIB


_VULKAN_KINDS = {
    "PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU": "integrated",
    "PHYSICAL_DEVICE_TYPE_DISCRETE_GPU": "discrete",
}


def vulkaninfo(text: str) -> list[tuple[str, str, int]]:
    """Return the GPUs of `vulkaninfo --summary`.

    Each has a name, "integrated" or "discrete", and the PCI vendor id (0 = unknown). Software
    renderers (llvmpipe, PHYSICAL_DEVICE_TYPE_CPU) are left out.
    """
    gpus = []
    for block in re.split(r"(?m)^GPU[0-9]+:", text)[1:]:
        values = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*(.*?)\s*$", block))
        name = values.get("deviceName")
        kind = _VULKAN_KINDS.get(values.get("deviceType", ""))
        if name and kind:
            gpus.append((name[:120], kind, hexadecimal(values.get("vendorID")) or 0))
    return gpus


def count_lost(text: str) -> int:
    """Return how many GPUs nvidia-smi reports as lost or without a device handle."""
    handles = re.findall(r"Unable to determine the device handle", text)
    rows = [line for line in text.splitlines() if "gpu is lost" in line.lower()]
    return len(handles) + len(rows)
