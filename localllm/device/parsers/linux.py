"""Linux's own files to facts: memory, processor, cgroup limits, memory modules from udev, WSL, board."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localllm.device.parsers import integer, key_values
from localllm.device.parsers.sticks import Ram, Stick, ram_of
from localllm.device.types import Readings

# cgroup v1 prints the largest page-aligned int64 when there is no limit.
_CGROUP_V1_UNLIMITED = 1 << 62


@dataclass(frozen=True, slots=True)
class MemInfo:
    """/proc/meminfo in bytes. `available_bytes` includes page cache the kernel can drop; `huge_free_bytes` are the free ones
    of the huge pages that somebody reserved (None: nobody did)."""

    total_bytes: int
    available_bytes: int
    huge_free_bytes: int | None = None


def meminfo(text: str) -> MemInfo | None:
    """/proc/meminfo; None without a usable MemTotal.

    MemFree is never used: it counts page cache as taken. MemAvailable leaves reserved huge pages out, as they are nobody's
    who did not ask for them.
    """
    values = key_values(text)

    def size(key: str) -> int | None:
        number = integer(values.get(key))
        return None if number is None or number < 0 else number * 1024

    total = size("MemTotal")
    if not total:
        return None
    available = size("MemAvailable")
    if available is None:  # kernels before 3.14
        available = (size("MemFree") or 0) + (size("Cached") or 0) + (size("Buffers") or 0)
    huge_pages = integer(values.get("HugePages_Total")) or 0
    huge_free = max(integer(values.get("HugePages_Free")) or 0, 0) * (size("Hugepagesize") or 0)
    return MemInfo(total, min(available, total), min(huge_free, total) if huge_pages > 0 else None)


@dataclass(frozen=True, slots=True)
class CpuInfo:
    """The processor's name, cores this process may use (0 = unknown), whether a hypervisor is under us, and the widest vectors
    ("" = unknown)."""

    name: str
    cores: int
    hypervisor: bool
    apple: bool = False
    vectors: str = ""


# ARM's /proc/cpuinfo has no name: implementer and part numbers (https://github.com/util-linux/util-linux,
# sys-utils/lscpu-arm.c) of the cores in the machines of the table.
_ARM_PARTS = {
    ("0x41", "0xd42"): "Cortex-A78AE", ("0x41", "0xd85"): "Cortex-X925", ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd83"): "Neoverse-V3AE", ("0x41", "0xd0c"): "Neoverse-N1", ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd4f"): "Neoverse-V2", ("0x41", "0xd0b"): "Cortex-A76", ("0x51", "0x001"): "Oryon",
}  # fmt: skip


_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse2": "SSE"}


def cpuinfo(text: str) -> CpuInfo:
    """/proc/cpuinfo: name from "model name", or ARM part numbers (the fastest kind listed last names the machine)."""
    names: list[str] = []
    processors = 0
    physical: set[tuple[str, str]] = set()
    package = core = implementer = ""
    apple = False
    for line in text.splitlines():
        key, sep, value = line.partition(":")
        key, value = key.strip(), value.strip()
        if not sep:
            continue
        if key == "processor":
            processors += 1
        elif key == "model name" and value:
            names.append(value)
        elif key == "physical id":
            package = value
        elif key == "core id":
            core = value
            physical.add((package, core))
        elif key == "CPU implementer":
            implementer = value
            apple = apple or value == "0x61"
        elif key == "CPU part":
            part = _ARM_PARTS.get((implementer, value.lower()))
            if part:
                names.append(part)
    kinds = list(dict.fromkeys(names))
    found = re.search(r"^flags\s*:(.*)", text, re.MULTILINE)
    flags = found[1].split() if found else []
    vectors = next((name for flag, name in _VECTORS.items() if flag in flags), "")
    return CpuInfo(" + ".join(kinds[:3]), len(physical) or processors, "hypervisor" in flags, apple, vectors)


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """A container's memory limit and what of it is really used (page cache apart), in bytes."""

    limit_bytes: int
    used_bytes: int
    where: str


def cgroup(readings: Readings) -> CgroupLimit | None:
    """The smallest memory limit on the way from this process's cgroup to the root, v1 or v2, used as far as leaves what the one
    with the least room leaves (a parent's other children take of its limit too); None if there is none.

    Page cache is left out, active or not, as the kernel takes it back before it ends a process: `max - current` under-estimates
    what is free after a model was read twice.
    """
    found: list[CgroupLimit] = []
    for path in _cgroup_folders(readings.file("/proc/self/cgroup")):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = integer(readings.file(f"{path}/{limit_name}"))
            if limit is None or limit <= 0 or limit >= _CGROUP_V1_UNLIMITED:
                continue
            used = integer(readings.file(f"{path}/{used_name}")) or 0
            stat = key_values(readings.file(f"{path}/memory.stat"), " ")
            prefix = "" if used_name == "memory.current" else "total_"  # v1: with the groups below
            cache = sum(integer(stat.get(f"{prefix}{age}_file")) or 0 for age in ("inactive", "active"))
            found.append(CgroupLimit(limit, min(max(used - cache, 0), limit), f"{path}/{limit_name}"))
    if not found:
        return None
    smallest = min(found, key=lambda x: x.limit_bytes)
    room = min(x.limit_bytes - x.used_bytes for x in found)
    return replace(smallest, used_bytes=max(0, smallest.limit_bytes - room))


def _cgroup_folders(self_cgroup: str) -> list[str]:
    """Every folder whose limits bind this process, from its own cgroup up to both roots."""
    folders: list[str] = []
    for line in self_cgroup.splitlines() or ["0::/"]:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root = "/sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..", ".")]
        folders += ["/".join([root, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return folders + [root for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory") if root not in folders]


def cgroup_paths(self_cgroup: str) -> list[str]:
    """The files a probe has to read so that `cgroup` can judge."""
    names = ("memory.max", "memory.current", "memory.stat", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return [f"{folder}/{name}" for folder in _cgroup_folders(self_cgroup) for name in names]


def udev_memory(text: str, channels: int = 0) -> Ram | None:
    """udev's copy of the SMBIOS memory records (/run/udev/data/+dmi:id, systemd ≥ 248); None if unusable. `channels`: as ram_of.

    The configured speed counts, not the rated one (https://github.com/systemd/systemd/pull/17837).
    """
    devices: dict[int, dict[str, str]] = {}
    for index, key, value in re.findall(r"MEMORY_DEVICE_([0-9]{1,4})_([A-Z_0-9]+)=(.*)", text):
        devices.setdefault(int(index), {})[key] = value.strip()
    sticks = [
        Stick(
            f"{fields.get('BANK_LOCATOR', '')} {fields.get('LOCATOR', '')}",
            integer(fields.get("CONFIGURED_SPEED_MTS")) or integer(fields.get("SPEED_MTS")) or 0,
            integer(fields.get("DATA_WIDTH")) or 0,
        )
        for _, fields in sorted(devices.items())
        if fields.get("PRESENT") != "0" and integer(fields.get("SIZE"))
    ]
    return ram_of(sticks, channels)


def is_wsl(readings: Readings) -> bool:
    """True inside Windows' Linux: its kernel names Microsoft, whatever the environment says."""
    return "microsoft" in readings.file("/proc/version").lower()


def last_level_cache_bytes(readings: Readings) -> int:
    """The largest cache level in bytes summed over its instances as seen from cpu0 (0 = unknown)."""
    sizes = []
    for path in readings.matching("/sys/devices/system/cpu/cpu*/cache/index*/size"):
        text = readings.file(path)
        number = integer(text)
        if number and number > 0:
            sizes.append(number * {"K": 1024, "M": 1 << 20, "G": 1 << 30}.get(text[-1:].upper(), 1))
    return max(sizes, default=0)
