"""The only module that asks this machine anything: a few lines of I/O per system, no judgement."""

from __future__ import annotations

import platform
import sys

from localllm.device.errors import DeviceUnreadableError
from localllm.device.readings import Readings


def read(*, slow: bool = False) -> Readings:
    """Read this machine once: no root, no torch, no CUDA context; well under 300 ms.

    `slow` adds what takes longer: on Windows the memory sticks, through CIM.
    """
    architecture = platform.machine()
    if sys.platform == "darwin":
        from localllm.device.probes import macos

        return Readings("macos", architecture, {}, macos.outputs())
    if sys.platform == "win32":
        from localllm.device.probes import windows

        outputs = windows.outputs()
        return Readings("windows", architecture, {}, outputs | (windows.physical_memory() if slow else {}))
    if sys.platform.startswith("linux"):
        from localllm.device.probes import linux

        return linux.read(architecture)
    raise DeviceUnreadableError(f"this system ({sys.platform}) is not one localllm can read: Linux, macOS or Windows")
