"""What macOS says of its memory, by sysctl(3)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Literal

Pressure = Literal["none", "shrink", "hold"]
"""How short memory is: "shrink": caches give back; "hold": besides, nothing that takes memory is
begun."""

# What kern.memorystatus_vm_pressure_level says: 1 normal, 2 warn, 4 critical (xnu,
# kern_memorystatus_notify.c).
PRESSURE: dict[int | None, Pressure] = {1: "none", 2: "shrink", 4: "hold"}


def available_bytes(total_bytes: int, level_percent: int | None) -> int | None:
    """Bytes that can be had on a Mac: `kern.memorystatus_level` of its RAM, which counts what macOS
    compresses for others (memory_pressure prints it as "System-wide memory free percentage"); None
    where that is unknown."""
    if level_percent is None or not 0 <= level_percent <= 100:
        return None
    return total_bytes * level_percent // 100


def sysctl(name: str) -> int | None:
    """One number of sysctl(3) in under a microsecond; None on another system, or where there is
    none of that name."""
    if sys.platform != "darwin":
        return None
    return sysctl_of(ctypes.CDLL(None).sysctlbyname, name)


def sysctl_of(by_name: Callable[..., int], name: str) -> int | None:
    """The number that `by_name`, a sysctlbyname, writes for `name`: of four bytes or eight."""
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(8)
    if by_name(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return None
    if size.value in (4, 8):
        return int(value.value)
    return None
