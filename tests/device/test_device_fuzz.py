"""Any text gives a Device or a typed error. No parser and no combination of readings raises
otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device import recordings
from localllm.device import parsers, parts_table
from localllm.device.machines import identify
from localllm.device.name_lookup import resolve
from localllm.device.parsers import linux, macos, windows
from localllm.device.parsers.gpus import amd_gpus, kfd_nodes, marketing_name, nvml, smi, vulkaninfo
from localllm.device.types import DeviceNotFoundError, Readings
from localllm.errors import LocalLLMError, UsageError
from localllm.memory.linux import LinuxMemory, files_to_read, meminfo
from support.examples import examples

TEXT_PARSERS: list[Any] = [
    meminfo, linux.cpuinfo, linux.udev_memory, files_to_read,
    nvml, smi,
    macos.sysctl, macos.gpu_cores, macos.displays, macos.metal_working_set, macos.vm_stat,
    windows.adapters, windows.processor, windows.memory_status, windows.physical_memory,
    vulkaninfo,
    parsers.integer, parsers.decimal, parsers.hexadecimal, parsers.key_values,
    parts_table.normalised_name, parts_table.by_gpu_name, parts_table.by_cpu,
]  # fmt: skip

# Words the parsers look for, so that random text gets past their first condition.
SEEDS = [
    "MemTotal: ", "MemAvailable:", "HugePages_Total: 9", " kB\n", "processor\t: 0\n",
    "model name\t: ",
    "0::/", "4:memory:/", "MEMORY_DEVICE_0_SIZE=", "MEMORY_DEVICE_1_CONFIGURED_SPEED_MTS=",
    "CHANNEL A",
    "name, memory.total [MiB]\n", "NVIDIA GB10", "GPU 00000000:01:00.0\n", "    Product Name : ",
    "    FB Memory Usage\n", "CPU part : 0xd87",
    "|   0  NVIDIA GeForce RTX 5090   Off | x | y |\n", "| a | 1MiB / 2MiB |",
    '[{"name": "x", "total": -1}]', '{"a":',
    "hw.memsize: ", '"gpu-core-count" = ', "recommendedMaxWorkingSetSize = ",
    "(page size of 16384 bytes)",
    "Pages free: ",
    "HKEY_LOCAL_MACHINE{4d36e968-e325-11ce-bfc1-08002be10318}\n    DriverDesc    REG_SZ    ",
    "ullTotalPhys: ",
    "GPU0:\n", "deviceName = ", "[[[[", "0x", "99999999999999999999", "-5", "1e308", "\x00", "٣",
    "²",
]  # fmt: skip

hostile = st.lists(st.one_of(st.text(max_size=40), st.sampled_from(SEEDS)), max_size=12).map(
    "".join
)


@pytest.mark.parametrize(
    "parser",
    TEXT_PARSERS,
    ids=lambda parser: f"{parser.__module__.split('.')[-1]}.{parser.__name__}",
)
@given(text=hostile)
@settings(max_examples=examples(150))
def test_parsers_accept_any_text_without_an_exception(parser: Any, text: str) -> None:
    found = parser(text)
    assert found == parser(text), "and says the same of the same text"


PATHS = [
    "/proc/meminfo", "/proc/cpuinfo", "/proc/version", "/proc/self/cgroup",
    "/proc/device-tree/model", "/.dockerenv",
    "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/run/udev/data/+dmi:id",
    "/sys/class/dmi/id/product_name",
    "/sys/class/drm/card0/device/vendor", "/sys/class/drm/card0/device/device",
    "/sys/class/drm/card0/device/revision",
    "/sys/class/drm/card0/device/mem_info_vram_total",
    "/sys/class/drm/card0/device/mem_info_vram_used",
    "/sys/class/drm/card0/device/mem_info_gtt_total",
    "/sys/class/drm/card0/device/mem_info_gtt_used",
    "/sys/class/drm/card0/device/product_name", "/sys/class/drm/card0/device/lmem_total_bytes",
    "/sys/class/kfd/kfd/topology/nodes/1/properties", "/usr/share/libdrm/amdgpu.ids",
    "/var/lib/nvpmodel/status",
]  # fmt: skip
OUTPUTS = [
    "nvml", "nvidia-smi", "vulkaninfo", "render-access", "sysctl", "ioreg", "system_profiler",
    "metal", "vm_stat",
    "memory-status", "display-class", "processor", "cores", "physical-memory",
    "native-architecture",
]  # fmt: skip


def is_sound(readings: Readings) -> bool:
    """Return whether the readings give a Device with possible figures, or one of our errors."""
    try:
        device = identify(readings)
    except LocalLLMError:
        return True
    for memory in (device.memory, device.host):
        if memory is not None:
            assert 0 <= memory.available_bytes <= memory.limit_bytes <= memory.total_bytes
    return device.bandwidth_gbps is None or device.bandwidth_gbps.value > 0


@given(
    system=st.sampled_from(["linux", "macos", "windows"]),
    architecture=st.sampled_from(["x86_64", "aarch64", "AMD64", ""]),
    files=st.dictionaries(
        st.sampled_from(PATHS),
        st.one_of(hostile, st.sampled_from(["0x1002", "0x1586", "8589934592"])),
    ),
    outputs=st.dictionaries(st.sampled_from(OUTPUTS), hostile),
)
@settings(max_examples=examples(400))
def test_any_readings_give_a_device_or_a_typed_error(
    system: Any, architecture: str, files: dict[str, str], outputs: dict[str, str]
) -> None:
    assert is_sound(Readings(system, architecture, files, outputs))


@given(name=st.sampled_from(recordings.names()), data=st.data())
@settings(max_examples=examples(300))
def test_a_damaged_recording_gives_a_device_or_a_typed_error(
    name: str, data: st.DataObject
) -> None:
    readings = recordings.load(name)
    key = data.draw(st.sampled_from(sorted([*readings.files, *readings.outputs])))
    text = readings.files.get(key, readings.outputs.get(key, ""))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(hostile) + text[stop:]
    if key in readings.files:
        assert is_sound(replace(readings, files={**readings.files, key: damaged}))
    else:
        assert is_sound(replace(readings, outputs={**readings.outputs, key: damaged}))


@given(
    name=st.one_of(
        hostile, st.text(max_size=30), st.sampled_from(["rtx", "m", "0", "gb", "2x", "m4 max 0gb"])
    )
)
@settings(max_examples=examples(200))
def test_any_typed_name_gives_a_device_or_an_error_with_a_hint(name: str) -> None:
    try:
        device = resolve(name)
    except (DeviceNotFoundError, UsageError):
        return
    assert device.simulated
    assert 0 < device.memory.limit_bytes <= device.memory.total_bytes


@given(files=st.dictionaries(st.sampled_from(PATHS), hostile))
@settings(max_examples=examples(100))
def test_structured_parsers_accept_any_files_without_an_exception(files: dict[str, str]) -> None:
    readings = Readings("linux", "x86_64", files)
    assert len(kfd_nodes(readings)) <= len(files)
    assert all(gpu.device_id >= 0 for gpu in amd_gpus(readings))
    memory = LinuxMemory(readings.file)
    assert (memory.available_bytes() or 0) <= (memory.total_bytes() or 0)
    assert linux.last_level_cache_bytes(readings) >= 0
    marketing_name(files.get("/usr/share/libdrm/amdgpu.ids", ""), 0x744C, 0xC8)
