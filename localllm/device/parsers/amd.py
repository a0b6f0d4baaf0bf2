"""amdgpu's sysfs and KFD topology to facts: memory pools in bytes, PCI identity, compute units."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localllm.device.parsers.numbers import hexadecimal, integer, key_values
from localllm.device.readings import Readings

AMD_VENDOR = 0x1002

# Radeons inside a processor: (device id → gfx), from https://gitlab.freedesktop.org/mesa/libdrm/-/blob/main/data/amdgpu.ids
# and, for the gfx names, https://rocm.docs.amd.com/en/latest/reference/gpu-arch-specs.html.
APU_DEVICES = {
    0x1586: "gfx1151",
    0x150E: "gfx1150",
    0x1114: "gfx1152",
    0x15BF: "gfx1103",
    0x15C8: "gfx1103",
    0x1900: "gfx1103",
    0x1901: "gfx1103",
    0x1681: "gfx1035",
    0x164E: "gfx1036",
    0x1506: "gfx1037",
    0x163F: "gfx1033",
    0x1435: "gfx1033",
    0x1638: "gfx90c",
    0x1636: "gfx90c",
    0x15D8: "gfx902",
    0x15DD: "gfx902",
}
_APU_GFX = set(APU_DEVICES.values())


@dataclass(frozen=True, slots=True)
class AmdGpu:
    """One AMD GPU. Bytes; ids are numbers; `gfx` is "gfx1151" or "" (unknown); compute units 0 = unknown."""

    card: str
    device_id: int
    revision: int
    name: str
    vram_total_bytes: int
    vram_used_bytes: int
    gtt_total_bytes: int
    gtt_used_bytes: int
    gfx: str
    compute_units: int
    integrated: bool


@dataclass(frozen=True, slots=True)
class KfdNode:
    """A GPU node of the KFD topology."""

    gfx: str
    compute_units: int
    vendor_id: int
    device_id: int
    render_minor: int


def kfd_nodes(readings: Readings) -> list[KfdNode]:
    """The GPU nodes of /sys/class/kfd (a CPU node has no SIMDs).

    gfx_target_version is major × 10000 + minor × 100 + step. RDNA has two SIMD32 per CU, GCN/CDNA four.
    """
    nodes = []
    for path in readings.matching("/sys/class/kfd/kfd/topology/nodes/*/properties"):
        values = {key: integer(value) or 0 for key, value in key_values(readings.file(path), " ").items()}
        simds, version = values.get("simd_count", 0), values.get("gfx_target_version", 0)
        if simds <= 0 or not 0 < version < 1_000_000:
            continue
        major, minor, step = version // 10000, version // 100 % 100, version % 100
        nodes.append(
            KfdNode(
                gfx=f"gfx{major}{minor:x}{step:x}",
                compute_units=simds // (2 if major >= 10 else 4),
                vendor_id=values.get("vendor_id", 0),
                device_id=values.get("device_id", 0),
                render_minor=values.get("drm_render_minor", -1),
            )
        )
    return nodes


def gpus(readings: Readings) -> list[AmdGpu]:
    """Every amdgpu card of /sys/class/drm, joined with its KFD node by PCI device id."""
    nodes = kfd_nodes(readings)
    found = []
    for path in readings.matching("/sys/class/drm/card*/device/vendor"):
        card = re.fullmatch(r"/sys/class/drm/(card[0-9]+)/device/vendor", path)
        if card is None or hexadecimal(readings.file(path)) != AMD_VENDOR:
            continue
        folder = f"/sys/class/drm/{card.group(1)}/device"
        device_id = hexadecimal(readings.file(f"{folder}/device")) or 0
        node = next((n for n in nodes if n.device_id == device_id), None)
        gfx = node.gfx if node else APU_DEVICES.get(device_id, "")

        def size(name: str, folder: str = folder) -> int:
            return max(integer(readings.file(f"{folder}/{name}")) or 0, 0)

        found.append(
            AmdGpu(
                card=card.group(1),
                device_id=device_id,
                revision=hexadecimal(readings.file(f"{folder}/revision")) or 0,
                name=" ".join(readings.file(f"{folder}/product_name").split())[:120],
                vram_total_bytes=size("mem_info_vram_total"),
                vram_used_bytes=size("mem_info_vram_used"),
                gtt_total_bytes=size("mem_info_gtt_total"),
                gtt_used_bytes=size("mem_info_gtt_used"),
                gfx=gfx,
                compute_units=node.compute_units if node else 0,
                integrated=_integrated(readings, folder, device_id, gfx),
            )
        )
    return [gpu for gpu in found if gpu.vram_total_bytes or gpu.gtt_total_bytes]


def _integrated(readings: Readings, folder: str, device_id: int, gfx: str) -> bool:
    """An APU by its PCI id or gfx; the size of its carve-out says nothing (a BIOS can give it 96 GB).

    board_info and mem_info_vram_vendor exist only where a card has memory chips of its own.
    """
    if device_id in APU_DEVICES or gfx in _APU_GFX:
        return True
    own_memory = any(f"{folder}/{name}" in readings.files for name in ("board_info", "mem_info_vram_vendor"))
    if own_memory:
        return False
    vram = integer(readings.file(f"{folder}/mem_info_vram_total")) or 0
    gtt = integer(readings.file(f"{folder}/mem_info_gtt_total")) or 0
    return vram <= 4 << 30 and gtt >= 4 * max(vram, 1 << 30)


def marketing_name(ids_file: str, device_id: int, revision: int) -> str:
    """The product's name from libdrm's amdgpu.ids ("744C,\\tC8,\\tAMD Radeon RX 7900 XTX"), or ""."""
    for line in ids_file.splitlines():
        parts = line.split(",", 2)
        if len(parts) == 3 and hexadecimal(parts[0]) == device_id and hexadecimal(parts[1]) == revision:
            return parts[2].strip()
    return ""
