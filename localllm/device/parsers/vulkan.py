"""`vulkaninfo --summary` to GPU names and kinds, for cards whose kernel driver gives no name."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VulkanGpu:
    """A Vulkan device: name, "integrated" or "discrete", PCI vendor id."""

    name: str
    kind: str
    vendor_id: int


def summary(text: str) -> list[VulkanGpu]:
    """GPUs of `vulkaninfo --summary`; software renderers (llvmpipe, PHYSICAL_DEVICE_TYPE_CPU) are left out."""
    found = []
    for block in re.split(r"(?m)^GPU[0-9]+:", text)[1:]:
        values = dict(re.findall(r"(?m)^\s*(\w+)\s*=\s*(.*?)\s*$", block))
        kind = {"PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU": "integrated", "PHYSICAL_DEVICE_TYPE_DISCRETE_GPU": "discrete"}
        vendor = re.fullmatch(r"0x([0-9a-fA-F]{1,8})", values.get("vendorID", ""))
        if values.get("deviceName") and values.get("deviceType") in kind:
            found.append(
                VulkanGpu(
                    values["deviceName"][:120], kind[values["deviceType"]], int(vendor.group(1), 16) if vendor else 0
                )
            )
    return found
