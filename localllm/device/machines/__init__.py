"""Readings of one machine to its Device: pure, one module per operating system."""

from __future__ import annotations

from localllm.device.machines import linux, macos, windows
from localllm.device.readings import Readings
from localllm.device.types import Device, Figure


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """The Device these readings describe. `ram_bandwidth` is this machine's measured memory bandwidth, if known.

    Raises DeviceUnreadableError when the system did not even say how much memory there is.
    """
    by_system = {"linux": linux.identify, "macos": macos.identify, "windows": windows.identify}
    return by_system[readings.system](readings, ram_bandwidth)
