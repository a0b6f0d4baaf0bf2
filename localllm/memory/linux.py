"""Memory available to this process on Linux: /proc/meminfo, limited by its control groups (v1 and
v2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ReadText = Callable[[str], str]
"""The text of a file; "" where there is none."""

MEMINFO = "/proc/meminfo"
OWN_GROUPS = "/proc/self/cgroup"
# cgroup v1 prints the largest page-aligned int64 if there is no limit.
_UNLIMITED = 1 << 62
# Longer than any real figure; int() of a million digits is slow.
_MAX_DIGITS = 20
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def read_text(path: str) -> str:
    """Read a file of this machine."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class MemInfo:
    """Fields of /proc/meminfo in bytes. A field is None if the kernel does not report it.

    `available_bytes`: includes page cache that the kernel can drop.
    `huge_free_bytes`: free huge pages, if the administrator reserved any (None: not reserved).
    """

    total_bytes: int
    available_bytes: int | None
    huge_free_bytes: int | None = None


def meminfo(text: str) -> MemInfo | None:
    """Parse /proc/meminfo. Returns None without a usable MemTotal.

    MemFree is never used alone, because it counts page cache as used. MemAvailable excludes
    reserved huge pages, because only programs that request huge pages can use them. Kernels before
    3.14 and WSL 1 lack MemAvailable. It is then computed as MemFree + Cached + Buffers - Shmem.
    Shared memory counts as cache but can't be dropped. This is the formula of free(1) before it
    used MemAvailable.
    """
    values: dict[str, int] = {}
    for name, number in _numbers(text):
        values.setdefault(name, number)
    total = values.get("MemTotal", 0) * 1024
    if total <= 0:
        return None
    available = values.get("MemAvailable")
    if available is None and "MemFree" in values:
        cached = values.get("Cached", 0) + values.get("Buffers", 0) - values.get("Shmem", 0)
        available = values["MemFree"] + max(cached, 0)
    available_bytes: int | None = None
    if available is not None:
        available_bytes = min(available * 1024, total)
    huge_free_bytes: int | None = None
    if values.get("HugePages_Total", 0) > 0:
        huge_free = values.get("HugePages_Free", 0) * values.get("Hugepagesize", 0) * 1024
        huge_free_bytes = min(huge_free, total)
    return MemInfo(total, available_bytes, huge_free_bytes)


def _number(text: str) -> int:
    """Parse a number. Returns 0 if `text` is no number or has more digits than any real value."""
    digits = text.strip("\x00 \t\r\n")
    if digits.isdecimal() and len(digits) <= _MAX_DIGITS:
        return int(digits)
    return 0


def _numbers(text: str) -> Iterator[tuple[str, int]]:
    """Yield each name with the first number after it, if that is not negative."""
    for line in text.splitlines():
        name, _, rest = line.replace(":", " ").strip().partition(" ")
        value = rest.split()
        if value and value[0].isdecimal() and len(value[0]) <= _MAX_DIGITS:
            yield name, int(value[0])


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """A control group whose memory may be limited.

    Before the kernel kills a process, it reclaims the group's page cache. So `max - current`
    underestimates the free memory after a model file was read twice.

    Files: kernel.org, cgroup-v2 (memory.max, memory.high) and cgroup-v1 memory
    (memory.limit_in_bytes).
    """

    folder: str
    is_v1: bool

    @property
    def files(self) -> tuple[str, ...]:
        """The files to read: bytes in use, statistics with the caches, and the limits.

        Beyond memory.high the kernel kills no process, but slows all of them down.
        """
        names = ["memory.current", "memory.stat", "memory.max", "memory.high"]
        if self.is_v1:
            names = ["memory.usage_in_bytes", "memory.stat", "memory.limit_in_bytes"]
        return tuple(f"{self.folder}/{name}" for name in names)

    def limit(self, read: ReadText) -> tuple[int, str] | None:
        """The group's smallest limit in bytes, and the file that has it; None if it has no
        limit."""
        limits = [(_number(read(file)), file) for file in self.files[2:]]
        return min((limit for limit in limits if 0 < limit[0] < _UNLIMITED), default=None)

    def free_bytes(self, read: ReadText) -> int | None:
        """Free bytes below the group's limit, not counting caches as used. None without a limit."""
        limited = self.limit(read)
        if limited is None:
            return None
        used_file, stat_file, *_ = self.files
        used = _number(read(used_file))
        stat = dict(_numbers(read(stat_file)))
        prefix = "total_" if self.is_v1 else ""  # v1: includes the child groups
        caches = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        return max(0, limited[0] - max(0, used - caches))


_ROOT = "/sys/fs/cgroup"
_V1_ROOT = "/sys/fs/cgroup/memory"


def control_groups(own_groups: str) -> list[ControlGroup]:
    """Return every control group that limits this process, from its own up to both roots.

    Inside a container, the path in /proc/self/cgroup may not exist, but the roots do.
    """
    found: list[ControlGroup] = []
    for line in own_groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        is_v1 = bool(controllers)
        root = _V1_ROOT if is_v1 else _ROOT
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            found.append(ControlGroup("/".join([root, *parts[:depth]]), is_v1))
    roots = [ControlGroup(_ROOT, False), ControlGroup(_V1_ROOT, True)]
    return found + [root for root in roots if root not in found]


def files_to_read(own_groups: str) -> list[str]:
    """Return the files that a recording must contain to create `LinuxMemory` from it."""
    return [name for group in control_groups(own_groups) for name in group.files]


class LinuxMemory:
    """The memory of this process: the machine's, or the part that its container allows.

    Groups with limits are found once. A later read skips all other groups.
    """

    def __init__(self, read: ReadText = read_text) -> None:
        self._read = read
        self._groups = [
            group for group in control_groups(read(OWN_GROUPS)) if group.limit(read) is not None
        ]

    def machine(self) -> MemInfo | None:
        """The memory of the whole machine; None if the kernel does not report it."""
        return meminfo(self._read(MEMINFO))

    def smallest_limit(self) -> tuple[int, str] | None:
        """The smallest limit below the machine's own memory, and the file that has it; None if this
        process is not limited."""
        machine = self.machine()
        limits = (group.limit(self._read) for group in self._groups)
        smallest = min((limit for limit in limits if limit is not None), default=None)
        if machine is None or smallest is None or smallest[0] >= machine.total_bytes:
            return None
        return smallest

    def total_bytes(self) -> int | None:
        machine = self.machine()
        smallest = self.smallest_limit()
        if machine is None:
            return None
        if smallest is None:
            return machine.total_bytes
        return smallest[0]

    def available_bytes(
        self, users: Iterable[int] = (), machine_bytes: int | None = None
    ) -> int | None:
        """Return the bytes that can be allocated now without swapping.

        Mapped files of the processes `users` count as used. The kernel reports pages of mapped
        weights as available, but if they were dropped, the next token would have to read them from
        disk.

        `machine_bytes`: free bytes of the machine, if not MemAvailable.
        """
        if machine_bytes is None:
            machine = self.machine()
            if machine is None or machine.available_bytes is None:
                return None
            machine_bytes = machine.available_bytes
        free = machine_bytes
        for group in self._groups:
            left = group.free_bytes(self._read)
            if left is not None:
                free = min(free, left)
        return max(0, free - sum(self._mapped_bytes(pid) for pid in users))

    def _mapped_bytes(self, pid: int) -> int:
        """Return the resident bytes of mapped files and shared memory.

        Source: proc(5), /proc/pid/statm, third field.
        """
        fields = self._read(f"/proc/{pid}/statm").split()
        if len(fields) > 2:
            return int(fields[2]) * _PAGE_BYTES
        return 0
