"""GPUs that share the system's memory, and GPUs that a plan leaves out, with the outputs of
reported machines."""

from __future__ import annotations

import json

import pytest

from localllm.device.machines import identify
from localllm.device.types import Device, Readings

GIB = 1 << 30
MIB = 1 << 20
HALO = "AMD RYZEN AI MAX+ 395 w/ Radeon 8060S"


def meminfo(gib: float) -> str:
    return f"MemTotal: {int(gib * MIB)} kB\nMemAvailable: {int(gib * MIB)} kB\n"


def linux(gib: float, cpu: str = "", arch: str = "x86_64", **outputs: str) -> Readings:
    files = {"/proc/meminfo": meminfo(gib)}
    if cpu:
        files["/proc/cpuinfo"] = f"processor\t: 0\nmodel name\t: {cpu}\nflags\t: avx avx2\n\n"
    return Readings("linux", arch, files, outputs)


def nvml(name: str, mib: int | None = None, capability: str = "8.6") -> str:
    major, minor = capability.split(".")
    gpu: dict[str, object] = {"name": name, "cc_major": int(major), "cc_minor": int(minor)}
    if mib is not None:
        gpu |= {"total": mib * MIB, "used": 0, "bus_bits": 256}
    return json.dumps([gpu])


def windows(gib: float, cpu: str, adapters: str, **outputs: str) -> Readings:
    shown = {
        "memory-status": f"ullTotalPhys: {int(gib * GIB)}\nullAvailPhys: {int(gib * GIB)}\n",
        "processor": f"    ProcessorNameString    REG_SZ    {cpu}\n",
        "display-class": adapters,
    }
    return Readings("windows", "AMD64", {}, shown | outputs)


def adapter(name: str, gib: int, device_id: str) -> str:
    key = r"HKEY_LOCAL_MACHINE\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}\0000"
    return (
        f"{key}\n    DriverDesc    REG_SZ    {name}\n"
        f"    HardwareInformation.qwMemorySize    REG_QWORD    {hex(gib * GIB)}\n"
        f"    MatchingDeviceId    REG_SZ    {device_id}\n"
    )


def amd_graphics(vram_gib: int, gtt_gib: int, device: str) -> dict[str, str]:
    folder = "/sys/class/drm/card0/device/"
    files = {"vendor": "0x1002", "device": device, "class": "0x030000"}
    files |= {
        "mem_info_vram_total": str(vram_gib * GIB),
        "mem_info_gtt_total": str(gtt_gib * GIB),
    }
    return {folder + name: text for name, text in files.items()}


def messages(device: Device) -> str:
    return "\n".join(finding.message for finding in device.findings)


def test_an_n1x_on_windows_shares_the_systems_memory() -> None:
    name = "NVIDIA RTX Spark N1X (5120-core Blackwell RTX GPU)"
    readings = windows(61.3, "NVIDIA N1X", "", nvml=nvml(name, 63936, "12.1"))
    device = identify(readings)
    assert (device.kind, device.accelerator, device.match) == ("unified", "cuda", "RTX Spark N1X")
    assert device.bandwidth_gbps.value == 300
    assert device.memory.total_bytes == pytest.approx(61.3 * GIB, rel=0.01)


@pytest.mark.parametrize(
    ("gib", "match", "gbps"),
    [(15.3, "Jetson Orin NX 16GB", 102.4), (7.4, "Jetson Orin Nano 8GB (15W)", 68.22)],
)
def test_a_jetson_in_a_container_is_known_by_its_memory(
    gib: float, match: str, gbps: float
) -> None:
    device = identify(linux(gib, arch="aarch64", nvml=nvml("Orin (nvgpu)", capability="8.7")))
    assert (device.match, device.bandwidth_gbps.value) == (match, gbps)
    assert device.bandwidth_gbps.basis == "assumed"


def test_on_linux_the_memory_of_integrated_graphics_is_named_with_a_card() -> None:
    readings = linux(124, HALO, nvml=nvml("NVIDIA GeForce RTX 3090", 24576))
    readings.files.update(amd_graphics(1, 120, "0x1586"))
    device = identify(readings)
    assert device.match == "GeForce RTX 3090"
    assert "Ryzen AI Max+ 395 (Strix Halo) (121 GiB, shared)" in messages(device)
    assert any("vulkan" in finding.fix for finding in device.findings)


def test_on_windows_the_memory_of_integrated_graphics_is_named_with_a_card() -> None:
    adapters = adapter("AMD Radeon(TM) 8060S Graphics", 64, r"PCI\VEN_1002&DEV_1586")
    card = nvml("NVIDIA GeForce RTX 3090", 24576)
    device = identify(windows(63.6, HALO, adapters, nvml=card))
    assert device.match == "GeForce RTX 3090"
    assert "AMD Radeon(TM) 8060S Graphics (96 GiB, shared)" in messages(device)


@pytest.mark.parametrize(("chip", "gbps"), [("Apple M6 Pro", 307), ("Apple M6 Max", 460)])
def test_an_unlisted_chip_has_the_bandwidth_of_the_last_one_of_its_tier(
    chip: str, gbps: float
) -> None:
    sysctl = f"machdep.cpu.brand_string: {chip}\nhw.memsize: {64 * GIB}\n"
    readings = Readings("macos", "arm64", {}, {"sysctl": sysctl, "ioreg": '"gpu-core-count" = 20'})
    figure = identify(readings).bandwidth_gbps
    assert (figure.value, figure.basis) == (gbps, "assumed")


def test_a_bc_250_has_gddr6() -> None:
    readings = linux(7.6, "AMD BC-250")
    readings.files.update(amd_graphics(8, 4, "0x13fe"))
    device = identify(readings)
    assert (device.match, device.bandwidth_gbps.value) == ("BC-250", 448)
    assert device.kind == "unified"


def test_a_slice_of_a_server_card_has_its_share_of_the_bandwidth() -> None:
    name = "NVIDIA RTX Pro 6000 Blackwell DC-24C"
    device = identify(linux(62, nvml=nvml(name, 24576, "12.0")))
    assert device.bandwidth_gbps.value == pytest.approx(1790 / 4, rel=0.01)


def test_a_gpu_lost_by_the_driver_is_reported_and_not_used() -> None:
    table = (
        "Unable to determine the device handle for GPU1: 0000:BA:00.0: Unknown Error\n"
        "name, uuid, memory.total [MiB], memory.used [MiB], memory.free [MiB], compute_cap\n"
        "NVIDIA GeForce RTX 3090, GPU-1, 24576 MiB, 5 MiB, 24100 MiB, 8.6\n"
        "NVIDIA GeForce RTX 3090, GPU-2, [GPU is lost], [GPU is lost], [GPU is lost], 8.6\n"
    )
    device = identify(linux(251, "AMD EPYC 7302P 16-Core Processor", **{"nvidia-smi": table}))
    assert device.n_gpus == 1
    assert "lost 2 NVIDIA GPU(s)" in messages(device)
