"""Parse Linux's own files: processor, memory modules from udev, WSL and board."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from localllm.device.parsers import integer, key_values
from localllm.device.parsers.dimms import Ram, Stick, ram_of
from localllm.device.types import Readings


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor according to /proc/cpuinfo.

    - `cores`: cores this process may use (0 = unknown).
    - `apple`: True for Apple's processors.
    - `vectors`: widest vectors ("" = unknown).
    """

    name: str
    cores: int
    apple: bool = False
    vectors: str = ""


# ARM's /proc/cpuinfo has no name. These are implementer and part numbers of the cores in the
# table's machines (https://github.com/util-linux/util-linux, sys-utils/lscpu-arm.c).
_ARM_PARTS = {
    ("0x41", "0xd42"): "Cortex-A78AE", ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd83"): "Neoverse-V3AE", ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd4f"): "Neoverse-V2", ("0x41", "0xd0b"): "Cortex-A76", ("0x51", "0x001"): "Oryon",
}  # fmt: skip


_VECTORS_BY_FLAG = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE"}


def cpuinfo(text: str) -> CpuInfo:
    """Parse /proc/cpuinfo.

    The name comes from "model name" or from ARM part numbers. Up to three kinds of core are listed,
    joined by " + ".
    """
    processors = [key_values(block) for block in re.split(r"\n\s*\n", text)]
    kinds: list[str] = []
    flags: list[str] = []
    is_apple = False
    for processor in processors:
        implementer = processor.get("CPU implementer", "")
        part = processor.get("CPU part", "").lower()
        kind = processor.get("model name") or _ARM_PARTS.get((implementer, part), "")
        if kind and kind not in kinds:
            kinds.append(kind)
        is_apple = is_apple or implementer == "0x61"
        if "flags" in processor and not flags:
            flags = processor["flags"].split()
    return CpuInfo(
        name=" + ".join(kinds[:3]),
        cores=_cores(processors, text),
        apple=is_apple,
        vectors=next((name for flag, name in _VECTORS_BY_FLAG.items() if flag in flags), ""),
    )


def _cores(processors: Sequence[Mapping[str, str]], text: str) -> int:
    physical_cores = {
        (processor.get("physical id"), processor["core id"])
        for processor in processors
        if "core id" in processor
    }
    if physical_cores:
        return len(physical_cores)
    n_processors = sum("processor" in processor for processor in processors)
    if n_processors:
        return n_processors
    return max(integer(key_values(text).get("# processors")) or 0, 0)  # s390x


def udev_memory(text: str, channels: int = 0) -> Ram | None:
    """Parse udev's copy of the SMBIOS memory records (/run/udev/data/+dmi:id, systemd ≥ 248).

    Returns None if they are unusable. `channels` is passed to ram_of. The configured speed counts,
    not the rated one (https://github.com/systemd/systemd/pull/17837).
    """
    fields_by_index: dict[int, dict[str, str]] = {}
    for index, key, value in re.findall(r"MEMORY_DEVICE_([0-9]{1,4})_([A-Z_0-9]+)=(.*)", text):
        fields_by_index.setdefault(int(index), {})[key] = value.strip()
    sticks = []
    for _, fields in sorted(fields_by_index.items()):
        if fields.get("PRESENT") == "0" or not integer(fields.get("SIZE")):
            continue
        position = f"{fields.get('BANK_LOCATOR', '')} {fields.get('LOCATOR', '')}"
        rated_speed = integer(fields.get("SPEED_MTS"))
        speed = integer(fields.get("CONFIGURED_SPEED_MTS")) or rated_speed or 0
        sticks.append(Stick(position, speed, integer(fields.get("DATA_WIDTH")) or 0))
    return ram_of(sticks, channels)


def is_wsl(readings: Readings) -> bool:
    """Return True inside WSL: its kernel names Microsoft, regardless of the environment."""
    return "microsoft" in readings.file("/proc/version").lower()


def last_level_cache_bytes(readings: Readings) -> int:
    """Return the size in bytes of the largest cache among the readings (0 = unknown)."""
    units = {"K": 1024, "M": 1 << 20, "G": 1 << 30}
    largest_bytes = 0
    for path in readings.matching("/sys/devices/system/cpu/cpu*/cache/index*/size"):
        text = readings.file(path)
        size_bytes = (integer(text) or 0) * units.get(text[-1:].upper(), 1)
        largest_bytes = max(largest_bytes, size_bytes)
    return largest_bytes
