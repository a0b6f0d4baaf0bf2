"""Readings of one machine to its Device: pure, one module per operating system."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from localllm.device.types import Device, Figure, Finding, Readings


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """The Device these readings describe. `ram_bandwidth` is this machine's measured memory
    bandwidth, if known.

    Raises DeviceUnreadableError when the system did not even say how much memory there is.
    """
    # Of three systems only the one that is needed is read.
    machine = import_module(f"{__name__}.{readings.system}")
    device: Device = machine.identify(readings, ram_bandwidth)
    figure = device.bandwidth_gbps
    if figure.basis != "assumed" or device.kind == "discrete":
        return device
    message = f"memory bandwidth is not known here yet: assumed {figure.value:g} GB/s, as of "
    said = Finding("info", message + figure.source, "localllm device --measure")
    return replace(device, findings=(*device.findings, said))
