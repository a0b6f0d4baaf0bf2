"""Keeps memory free for the system: what may be loaded now, and when a running engine must give memory back.

Three marks on what is available, the headroom being what the system keeps (`headroom_bytes`):

    available ≥ headroom     none     load what fits above the headroom; the prefix cache may grow
    below it                 shrink   the prefix cache stops growing and gives back what is missing, oldest first
    below half of it         hold     besides, nobody joins the running batch where that takes memory

A level is left a quarter of the headroom above the mark that started it, so that giving back does not flap.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import DoesNotFitError
from localllm.headroom import Pressure as Pressure
from localllm.headroom import headroom_bytes as headroom_bytes
from localllm.headroom import mac_available_bytes, mac_pressure, mac_sysctl

Available = Callable[[], int | None]

_HOLD_SHARE = 0.5
_LEAVE_SHARE = 0.25
_LOOK_S = 0.25
# cgroup v1 prints the largest page-aligned int64 when there is no limit.
_UNLIMITED = 2**62


def judge(available_bytes: int | None, headroom_bytes: int, before: Pressure = "none") -> Pressure:
    """The level that `available_bytes` means, coming from the level `before`. Unknown availability is no pressure."""
    if available_bytes is None or headroom_bytes <= 0:
        return "none"
    leave = _LEAVE_SHARE * headroom_bytes
    if available_bytes < _HOLD_SHARE * headroom_bytes + (leave if before == "hold" else 0):
        return "hold"
    return "shrink" if available_bytes < headroom_bytes + (leave if before != "none" else 0) else "none"


def check_load(
    name: str, planned_bytes: int, available_bytes: int | None, headroom_bytes: int, total_bytes: int | None = None
) -> None:
    """Raise DoesNotFitError unless loading `planned_bytes` leaves the headroom free. Unknown (0 planned, or None
    available) trusts the plan; a headroom of 0 is no guard. `total_bytes`: all memory, for the account in the error."""
    if (
        not planned_bytes
        or available_bytes is None
        or not headroom_bytes
        or planned_bytes <= available_bytes - headroom_bytes
    ):
        return
    others = f"; others have {_gb(max(0, total_bytes - available_bytes))} of {_gb(total_bytes)}" if total_bytes else ""
    raise DoesNotFitError(
        f"{name} needs {_gb(planned_bytes)}, and {_gb(max(0, available_bytes - headroom_bytes))} are free for it now: "
        f"{_gb(available_bytes)} available, of which {_gb(headroom_bytes)} stay with the system{others}",
        hint="close other programs, or take a smaller --context, a smaller quant or another model",
    )


def check_before_load(
    name: str, planned_bytes: int, headroom: int | None = None, available: Available | None = None
) -> None:
    """`check_load` with what is free now. `headroom`: bytes (None: by the machine's size); `available`: what is free
    (None: asked of the system)."""
    if not planned_bytes:
        return
    system = SystemMemory(process_and_children)
    if headroom is None:
        headroom = headroom_bytes(system.total_bytes)
    check_load(name, planned_bytes, (available or system.available_bytes)(), headroom, system.total_bytes)


@dataclass
class MemoryGuard:
    """The running engine's view: `look` now and then, then read `pressure` and `missing_bytes`. `told`: the system's own
    word for its pressure (macOS), which goes before what is available."""

    available: Available
    headroom_bytes: int
    told: Callable[[], Pressure | None] = lambda: None
    pressure: Pressure = "none"
    available_bytes: int | None = None
    _next_look_s: float = float("-inf")

    def look(self, now_s: float, *, force: bool = False) -> bool:
        """Read what is available, at most four times a second unless forced; True if it was read."""
        if self.headroom_bytes <= 0 or (now_s < self._next_look_s and not force):
            return False
        self._next_look_s = now_s + _LOOK_S
        self.available_bytes = self.available()
        self.pressure = self.told() or judge(self.available_bytes, self.headroom_bytes, self.pressure)
        return True

    @property
    def missing_bytes(self) -> int:
        """What must be given back to have the headroom free again; where the system alone says that memory is short, a part
        of the headroom at each look."""
        missing = 0 if self.available_bytes is None else max(0, self.headroom_bytes - self.available_bytes)
        short = int(_LEAVE_SHARE * self.headroom_bytes) if self.told() in ("shrink", "hold") else 0
        return max(missing, short)

    @property
    def spare_bytes(self) -> int | None:
        """What can be taken above the headroom, as last seen; None while nobody knows."""
        if self.pressure != "none":
            return 0
        return None if self.available_bytes is None else max(0, self.available_bytes - self.headroom_bytes)

    def why(self) -> str:
        """The state in one sentence, for an error."""
        return (
            f"this machine has {_gb(self.available_bytes or 0)} of memory left and {_gb(self.headroom_bytes)} "
            "are kept for the system"
        )

    def snapshot(self) -> dict[str, int | str]:
        """The state as plain values; available_bytes is missing while it is unknown."""
        known = {} if self.available_bytes is None else {"available_bytes": self.available_bytes}
        return {**known, "headroom_bytes": self.headroom_bytes, "pressure": self.pressure}


ReadText = Callable[[str], str | None]


def _read_text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _own_process() -> Iterable[int]:
    return (os.getpid(),)


def process_and_children() -> Iterable[int]:
    """This process and those it started: a server and its workers."""
    import psutil

    return (os.getpid(), *(child.pid for child in psutil.Process().children()))


class SystemMemory:
    """The system's memory, read cheaply: on Linux from /proc and this process's cgroups, elsewhere through psutil.

    `users` names the processes whose mapped files count as taken: the kernel reports a page of mapped weights as
    available, yet taking it would make the next token wait for the disk. Linux alone reports them so.
    """

    def __init__(
        self,
        users: Callable[[], Iterable[int]] = _own_process,
        read: ReadText = _read_text,
        sysctl: Callable[[str], int | None] = mac_sysctl,
    ) -> None:
        self._users = users
        self._read = read
        self._sysctl = sysctl
        self._linux = read("/proc/meminfo") is not None
        # Which groups are limited is asked once: a look then reads nothing for the others.
        self._groups = [g for g in _cgroups(read) if g.limit_bytes(read) is not None] if self._linux else []

    @property
    def total_bytes(self) -> int | None:
        """Memory this process may use: the machine's, or its container's."""
        if not self._linux:
            import psutil

            return self._sysctl("hw.memsize") or int(psutil.virtual_memory().total)
        total = _field(self._read("/proc/meminfo"), "MemTotal:", 1024)
        limits = [limit for g in self._groups if (limit := g.limit_bytes(self._read)) is not None]
        return min([total, *limits]) if total is not None else None

    def available_bytes(self) -> int | None:
        """What can be taken now without swapping: free memory and page cache, without the files `users` have mapped.

        None if the system does not say."""
        if not self._linux:
            import psutil

            # psutil's figure on macOS is free and inactive memory, about half of what can be had.
            on_mac = mac_available_bytes(self.total_bytes or 0, self._sysctl("kern.memorystatus_level"))
            return int(psutil.virtual_memory().available) if on_mac is None else on_mac
        available = _field(self._read("/proc/meminfo"), "MemAvailable:", 1024)
        if available is None:
            return None
        free = [free for g in self._groups if (free := g.free_bytes(self._read)) is not None]
        return max(0, min([available, *free]) - sum(self._mapped_bytes(pid) for pid in self._users()))

    def pressure(self) -> Pressure | None:
        """What the system itself says of its memory; None where it says nothing (all but macOS)."""
        return None if self._linux else mac_pressure(self._sysctl("kern.memorystatus_vm_pressure_level"))

    def _mapped_bytes(self, pid: int) -> int:
        """Resident pages of mapped files (and shared memory): proc(5), /proc/pid/statm, third field."""
        fields = (self._read(f"/proc/{pid}/statm") or "").split()
        return int(fields[2]) * _PAGE_BYTES if len(fields) > 2 else 0


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """One memory-limited group of processes. The page cache charged to it is reclaimed before anything is killed."""

    folder: str
    limit: str
    used: str
    caches: tuple[str, str]

    def limit_bytes(self, read: ReadText) -> int | None:
        text = (read(f"{self.folder}/{self.limit}") or "").strip()
        return int(text) if text.isdecimal() and 0 < int(text) < _UNLIMITED else None

    def free_bytes(self, read: ReadText) -> int | None:
        limit, used = self.limit_bytes(read), (read(f"{self.folder}/{self.used}") or "").strip()
        if limit is None or not used.isdecimal():
            return None
        stat = read(f"{self.folder}/memory.stat")
        cache = sum(_field(stat, f"{name} ", 1) or 0 for name in self.caches)
        return max(0, limit - max(0, int(used) - cache))


def _cgroups(read: ReadText) -> list[_Cgroup]:
    """Every group whose limit binds this process, up to the root, v1 and v2: kernel.org, cgroup-v2 and cgroup-v1
    memory. Inside a container the path of /proc/self/cgroup may not exist; its root always does."""
    found: list[_Cgroup] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        parts = [p for p in path.split("/") if p not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            if controllers:
                folder = "/".join(["/sys/fs/cgroup/memory", *parts[:depth]])
                caches = ("total_inactive_file", "total_active_file")
                found.append(_Cgroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", caches))
            else:
                folder = "/".join(["/sys/fs/cgroup", *parts[:depth]])
                found.append(_Cgroup(folder, "memory.max", "memory.current", ("inactive_file", "active_file")))
    return found


def _field(text: str | None, start: str, unit: int) -> int | None:
    for line in (text or "").splitlines():
        if line.startswith(start):
            value = line[len(start) :].split()
            return int(value[0]) * unit if value and value[0].isdecimal() else None
    return None


def return_to_system() -> None:
    """Hand freed memory back: glibc keeps what it was given for the next allocation. Other systems' allocators return
    blocks of this size by themselves. malloc_trim(3)."""
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
    if trim is not None:
        trim(0)


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
