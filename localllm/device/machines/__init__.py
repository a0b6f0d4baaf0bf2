"""Readings of one machine to its Device: pure, one module per operating system."""

from __future__ import annotations

from localllm.device.types import Device, Figure, Readings


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """The Device these readings describe. `ram_bandwidth` is this machine's measured memory
    bandwidth, if known.

    Raises DeviceUnreadableError when the system did not even say how much memory there is.
    """
    # Of three systems only the one that is needed is read.
    if readings.system == "linux":
        from localllm.device.machines import linux

        return linux.identify(readings, ram_bandwidth)
    if readings.system == "macos":
        from localllm.device.machines import macos

        return macos.identify(readings, ram_bandwidth)
    from localllm.device.machines import windows

    return windows.identify(readings, ram_bandwidth)
