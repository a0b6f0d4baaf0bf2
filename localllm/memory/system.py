"""Read the system's memory: its size, the available part, and the pressure that the system reports."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from localllm.memory import macos
from localllm.memory.account import Memory, shared_pool
from localllm.memory.linux import MEMINFO, LinuxMemory, ReadText, read_text


def own_process() -> Iterable[int]:
    return (os.getpid(),)


def process_and_children() -> Iterable[int]:
    """This process and those it started: a server and its workers."""
    import psutil

    return (os.getpid(), *(child.pid for child in psutil.Process().children()))


class SystemMemory:
    """System memory, at a low cost per read.

    On Linux it is read from /proc and this process's control groups, elsewhere with psutil. `users`
    returns the processes whose mapped files count as used (localllm/memory/linux.py). Only Linux
    reports such files as free.
    """

    def __init__(
        self,
        users: Callable[[], Iterable[int]] = own_process,
        read: ReadText = read_text,
        sysctl: Callable[[str], int | None] = macos.sysctl,
    ) -> None:
        self._users = users
        self._sysctl = sysctl
        self._linux = LinuxMemory(read) if read(MEMINFO) else None

    @property
    def total_bytes(self) -> int | None:
        """Memory that this process may use: the machine's, or its container's."""
        if self._linux is not None:
            return self._linux.total_bytes()
        return self._sysctl("hw.memsize") or int(_psutil_memory().total)

    def available_bytes(self) -> int | None:
        """Bytes that can be allocated now without swapping. None if the system does not report it."""
        if self._linux is not None:
            return self._linux.available_bytes(self._users())
        # On macOS, psutil returns free and inactive memory: about half of the memory that is
        # available.
        on_mac = macos.available_bytes(
            self.total_bytes or 0, self._sysctl("kern.memorystatus_level")
        )
        if on_mac is None:
            return int(_psutil_memory().available)
        return on_mac

    def pressure(self) -> macos.Pressure | None:
        """The memory pressure that macOS reports. None on other systems."""
        if self._linux is not None:
            return None
        return macos.PRESSURE.get(self._sysctl("kern.memorystatus_vm_pressure_level"))

    def account(self, headroom: int | None = None) -> Memory | None:
        """The account of system memory with `headroom` reserved bytes (None: by the machine's
        size).

        Returns None if the system does not report its memory.
        """
        total = self.total_bytes
        available = self.available_bytes()
        if total is None or available is None:
            return None
        return shared_pool(total, available, "the system", headroom)


def _psutil_memory() -> Any:
    import psutil

    return psutil.virtual_memory()


def free_for_models(headroom: int | None = None) -> int | None:
    """Bytes of system memory that models may use now: all except the `headroom`.

    `headroom` is in bytes (None: by the machine's size). Returns None if the system does not report
    its memory or if the headroom is 0. Then only the plan decides.
    """
    account = SystemMemory(process_and_children).account(headroom)
    if account is None or not account.system_bytes:
        return None
    return account.available_bytes


# mallopt(3)
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 2**20


def return_large_blocks() -> None:
    """From now on, return freed blocks of 1 MiB or more to the system at once.

    glibc raises its limit with each larger block that is freed, up to 32 MiB, and keeps smaller
    blocks for later allocations.
    """
    if not sys.platform.startswith("linux"):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # without effect in musl
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_to_system() -> None:
    """Return freed memory to the system with malloc_trim(3).

    glibc keeps freed memory for later allocations. Allocators of other systems return blocks of
    this size by themselves.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in musl
    if trim is not None:
        trim(0)
