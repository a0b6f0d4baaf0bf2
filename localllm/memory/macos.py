"""Read the memory state of macOS with sysctl(3)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Literal

Pressure = Literal["none", "shrink", "hold"]
"""How short memory is: "shrink": caches give back; "hold": besides, nothing that takes memory is
begun."""

# Values of kern.memorystatus_vm_pressure_level: 1 normal, 2 warn, 4 critical (xnu,
# kern_memorystatus_notify.c).
PRESSURE: dict[int | None, Pressure] = {1: "none", 2: "shrink", 4: "hold"}


def available_bytes(total_bytes: int, level_percent: int | None) -> int | None:
    """Bytes available on a Mac: `kern.memorystatus_level` percent of its RAM. None if unknown.

    The level includes memory of other programs that macOS can compress. memory_pressure prints it
    as "System-wide memory free percentage".
    """
    if level_percent is None or not 0 <= level_percent <= 100:
        return None
    return total_bytes * level_percent // 100


def sysctl(name: str) -> int | None:
    """Read one number with sysctl(3) in under 1 µs. None if the name or the function does not
    exist."""
    if sys.platform != "darwin":
        return None
    return sysctl_of(ctypes.CDLL(None).sysctlbyname, name)


def sysctl_of(by_name: Callable[..., int], name: str) -> int | None:
    """Return the number that `by_name` (sysctlbyname) writes for `name`, of four or eight bytes."""
    value = ctypes.c_uint64(0)
    size = ctypes.c_size_t(8)
    if by_name(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        return None
    if size.value in (4, 8):
        return int(value.value)
    return None
