"""Every row of the table gives the same answer if its name is typed and if it is detected from the
output of such a machine."""

from __future__ import annotations

import json
import re

import pytest

from localllm.device import parts_table, usable
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.parts_table import DeviceRow
from localllm.device.types import Readings

GIB = 1 << 30
_CLASS = r"HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}\0000"
_HOST = "MemTotal: 65011712 kB\nMemAvailable: 64011712 kB\n"
# Parts on which no program of ours runs, and parts that are not on sale.
PLANNED_ONLY = {"iPhone 17 Pro (A19 Pro)", "Ryzen AI Max 500 (Medusa Halo)", "Jetson Orin Nano 2"}
# Memory in use on an idle system. It is subtracted from the free memory of a described machine.
IDLE = 2.1 * GIB


def pool(gib: float) -> str:
    return f"MemTotal: {int(gib * GIB / 1024)} kB\nMemAvailable: {int(gib * GIB / 1024)} kB\n"


def processor(name: str) -> str:
    return f"processor\t: 0\nmodel name\t: {name}\nflags\t: avx avx2\n\n"


def linux(files: dict[str, str], **outputs: str) -> Readings:
    return Readings("linux", "x86_64", {"/proc/meminfo": _HOST, **files}, outputs)


def drm(**files: object) -> dict[str, str]:
    return {f"/sys/class/drm/card0/device/{name}": str(text) for name, text in files.items()}


def card(row: DeviceRow, gib: float) -> Readings:
    if row.vendor.startswith("NVIDIA"):
        gpu = {"name": row.names[0], "total": int(0.995 * gib * GIB), "used": 0, "bus_bits": 256}
        if "GDDR6" in row.name:  # its driver's name is shared with another part: clocks decide
            gpu["max_memory_mhz"] = round(row.bandwidth().value * 1000 / 64)
        return linux({}, nvml=json.dumps([gpu]))
    _, device, revision = (*row.pci[0].split(":"), "0")[:3] if row.pci else ("", "ffff", "0")
    if row.vendor == "AMD":
        memory = {"mem_info_vram_total": int(0.999 * gib * GIB), "mem_info_gtt_total": 30 * GIB}
        shown = {"product_name": row.names[0], "board_info": "", **memory}
        return linux(drm(vendor="0x1002", device=device, revision=revision, **shown))
    files = drm(vendor="0x8086", device=device, lmem_total_bytes=int(gib * GIB))
    summary = f"GPU0:\n vendorID = 0x8086\n deviceName = {row.names[0]}\n"
    return linux(files, vulkaninfo=f"{summary} deviceType = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU\n")


def mac(row: DeviceRow, gib: float) -> Readings:
    sysctl = f"machdep.cpu.brand_string: {row.chip}\nhw.memsize: {int(gib * GIB)}\n"
    limit_mb = usable.mac_current(int(gib * GIB)) // 2**20
    sysctl += f"iogpu.wired_limit_mb: {limit_mb}\n"
    ioreg = f'"gpu-core-count" = {row.compute_units}'
    return Readings("macos", "arm64", {}, {"sysctl": sysctl, "ioreg": ioreg})


def one_pool(row: DeviceRow, gib: float) -> Readings:
    """Return the readings of a machine whose graphics share its memory."""
    name = re.sub(r"\(.*?\)", "", row.name)
    if row.vendor.startswith("NVIDIA"):
        files = {"/proc/meminfo": pool(0.955 * gib), "/sys/class/dmi/id/product_name": name}
        if row.family == "Jetson":
            mode = "pmode:0000 MAXN" if "Super" in row.name else "pmode:0001 15W"
            files |= {"/proc/device-tree/model": f"NVIDIA {name}"}
            files |= {"/var/lib/nvpmodel/status": mode}
        gpu = json.dumps([{"name": row.names[0] if row.names else f"NVIDIA {name}"}])
        return Readings("linux", "aarch64", files, {"nvml": gpu})
    if row.vendor == "Qualcomm":
        shown = {
            "memory-status": f"ullTotalPhys: {int(gib * GIB)}\nullAvailPhys: {int(gib * GIB)}\n"
        }
        shown["processor"] = f"    ProcessorNameString    REG_SZ    Snapdragon(R) - {row.cpu[0]}\n"
        return Readings("windows", "ARM64", {}, shown)
    if row.vendor == "generic":
        return linux({"/proc/meminfo": pool(gib), "/proc/device-tree/model": row.name})
    named = processor(row.cpu[0] if row.cpu else "a processor")
    _, device, *_ = row.pci[0].split(":") if row.pci else ("", "0")
    files = {"/proc/meminfo": pool(gib), "/proc/cpuinfo": named}
    if row.vendor == "Intel":
        return linux(files | drm(vendor="0x8086", device=device))
    apu = {"mem_info_vram_total": GIB // 2, "mem_info_gtt_total": int(gib * GIB // 2)}
    if "Halo" in row.family:
        apu["mem_info_gtt_total"] = int(110 / 128 * gib * GIB)
    revision = row.pci[0].split(":")[2] if row.pci and row.pci[0].count(":") > 1 else "0"
    shown = {"device": device if row.pci else GFX[row.compute_capability], "revision": revision}
    return linux(files | drm(vendor="0x1002", **shown, **apu))


# Graphics ids by architecture, for rows without ids.
GFX = {"gfx1103": "15bf", "gfx1150": "150e", "gfx1151": "1586", "gfx1152": "1114", "gfx1035": "1681",
       "gfx90c": "1638", "gfx902": "15d8"}  # fmt: skip


def system(row: DeviceRow) -> Readings:
    """Return the readings of a computer with as many modules as the row has channels."""
    rate = re.findall(r"DDR[345]X?-([0-9]+)", row.name)[0]
    counted = re.search(r"([0-9]+)-channel", row.name)
    n = int(counted[1]) if counted else 1 if "single" in row.name else 2
    lines = "".join(
        f"E:MEMORY_DEVICE_{i}_{field}\n"
        for i in range(n)
        for field in (
            f"SIZE={8 * GIB}",
            f"SPEED_MTS={rate}",
            "DATA_WIDTH=64",
            f"LOCATOR=DIMM_{chr(65 + i)}1",
        )
    )
    return linux({"/proc/meminfo": pool(32), "/run/udev/data/+dmi:id": lines})


def cases() -> list[tuple[DeviceRow, float]]:
    rows = [row for row in parts_table.rows() if row.name not in PLANNED_ONLY]
    return [(row, size) for row in rows for size in row.memory_gb or (32.0,)]


@pytest.mark.parametrize("vendor", sorted({row.vendor for row in parts_table.rows()}))
def test_a_machine_is_the_same_by_name_and_by_detection(vendor: str) -> None:
    for row, gib in (case for case in cases() if case[0].vendor == vendor):
        if row.kind == "discrete":
            readings = card(row, gib)
        elif row.kind == "system":
            readings = system(row)
        else:
            readings = mac(row, gib) if row.chip else one_pool(row, gib)
        typed, detected = resolve(row.name, memory_gb=gib), identify(readings)
        said = (row.name, gib, typed.name, detected.name)
        assert typed.accelerator == detected.accelerator, said
        assert typed.bandwidth_gbps.value == pytest.approx(
            detected.bandwidth_gbps.value, rel=0.01
        ), said
        assert typed.memory.total_bytes == pytest.approx(detected.memory.total_bytes, rel=0.05), (
            said
        )
        assert typed.usable_bytes == pytest.approx(detected.usable_bytes, rel=0.05, abs=IDLE), said


@pytest.mark.parametrize("device", ["0x164e", "0x13c0"])
def test_small_graphics_of_a_desktop_processor_are_ignored(device: str) -> None:
    """Graphics with two compute units only drive a screen. By name and by detection, the device is
    the processor."""
    files = drm(vendor="0x1002", device=device, mem_info_vram_total=GIB // 2)
    files |= drm(mem_info_gtt_total=30 * GIB)
    files["/proc/cpuinfo"] = processor("AMD Ryzen 5 7600X 6-Core Processor")
    typed, detected = resolve("ryzen 5 7600x 64gb"), identify(linux(files))
    assert (typed.kind, typed.accelerator) == (detected.kind, detected.accelerator)
    assert typed.bandwidth_gbps.value == detected.bandwidth_gbps.value


@pytest.mark.parametrize(
    "name",
    ["Ryzen 5 3400G", "Ryzen 5 PRO 6650U", "Ryzen 7 PRO 6850U", "Ryzen Z2", "Ryzen Z2 Extreme"],
)
def test_processors_with_graphics_are_the_same_by_name_and_by_detection(name: str) -> None:
    row = parts_table.by_cpu(f"AMD {name} with Radeon Graphics")
    assert row is not None
    files = drm(vendor="0x1002", device=f"0x{GFX[row.compute_capability]}")
    files |= drm(mem_info_vram_total=GIB // 2, mem_info_gtt_total=30 * GIB)
    files["/proc/cpuinfo"] = processor(f"AMD {name} with Radeon Graphics")
    typed, detected = resolve(f"{name} 64gb"), identify(linux(files))
    assert (typed.accelerator, typed.match) == (detected.accelerator, detected.match)
    assert typed.bandwidth_gbps.value == detected.bandwidth_gbps.value
