"""Turn the readings of one machine into its Device, with one module per operating system.

These modules do no I/O.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from localllm.device.types import Device, Figure, Finding, Readings


def identify(readings: Readings, ram_bandwidth: Figure | None = None) -> Device:
    """Return the Device that these readings describe.

    `ram_bandwidth` is the measured memory bandwidth of this machine, if known. Raises
    DeviceUnreadableError if the system did not report how much memory there is.
    """
    # Only the module of the machine's system is imported.
    machine = import_module(f"{__name__}.{readings.system}")
    device: Device = machine.identify(readings, ram_bandwidth)
    figure = device.bandwidth_gbps
    if figure.basis != "assumed" or device.kind == "discrete":
        return device
    message = (
        f"the memory bandwidth of this machine is unknown: assumed {figure.value:g} GB/s, as of "
    )
    finding = Finding("info", message + figure.source, "localllm device --measure")
    return replace(device, findings=(*device.findings, finding))
