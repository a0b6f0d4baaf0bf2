"""Read a Linux machine: /proc, /sys, udev's memory records, NVML. A few milliseconds without an NVIDIA driver."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterator

from localllm.device.parsers.linux import cgroup_paths
from localllm.device.probes import nvidia
from localllm.device.probes.commands import read_text, run
from localllm.device.readings import Readings

_FILES = (
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/version",
    "/proc/device-tree/model",
    "/proc/self/cgroup",
    "/.dockerenv",
    "/etc/nv_tegra_release",
    "/run/udev/data/+dmi:id",
    "/sys/class/dmi/id/product_name",
    "/sys/class/dmi/id/sys_vendor",
    "/sys/module/ttm/parameters/pages_limit",
    "/sys/module/amdgpu/parameters/gttsize",
    "/sys/firmware/acpi/platform_profile",
    "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    "/var/lib/nvpmodel/status",
)
_PATTERNS = (
    "/sys/class/kfd/kfd/topology/nodes/*/properties",
    "/sys/devices/system/cpu/cpu0/cache/index*/size",
    "/sys/class/power_supply/*/online",
)
_CARD_FILES = (
    "vendor",
    "device",
    "revision",
    "class",
    "product_name",
    "board_info",
    "mem_info_vram_total",
    "mem_info_vram_used",
    "mem_info_vram_vendor",
    "mem_info_gtt_total",
    "mem_info_gtt_used",
    "lmem_total_bytes",
)


def read(architecture: str) -> Readings:
    """Everything a Linux Device is identified from."""
    files = {path: text for path in _paths() if (text := read_text(path)) is not None}
    for path in cgroup_paths(files.get("/proc/self/cgroup", "")):
        text = read_text(path)
        if text is not None:
            files[path] = text
    vendors = {text.strip() for path, text in files.items() if path.endswith("/device/vendor") or _is_pci(path)}
    outputs: dict[str, str] = {}
    if text := nvidia.nvml():
        outputs["nvml"] = text
    elif text := nvidia.smi():
        outputs["nvidia-smi"] = text
    if "0x1002" in vendors:
        ids = read_text("/usr/share/libdrm/amdgpu.ids")
        if ids is not None:
            files["/usr/share/libdrm/amdgpu.ids"] = ids
        outputs["render-access"] = _render_access()
    # vulkaninfo loads every driver (100 ms and more): only where it can name a card that nothing else names.
    if "0x8086" in vendors and "nvml" not in outputs and shutil.which("vulkaninfo"):
        outputs["vulkaninfo"] = run("vulkaninfo", "--summary", timeout_s=2.0)
    return Readings("linux", architecture, files, outputs)


def _paths() -> Iterator[str]:
    yield from _FILES
    for pattern in _PATTERNS:
        yield from glob.glob(pattern)
    for card in glob.glob("/sys/class/drm/card[0-9]*/device"):
        if "-" not in card.split("/")[4]:  # card0-DP-1 is a connector
            yield from (f"{card}/{name}" for name in _CARD_FILES)
    for device in glob.glob("/sys/bus/pci/devices/*"):
        yield from (f"{device}/vendor", f"{device}/class")


def _is_pci(path: str) -> bool:
    return path.startswith("/sys/bus/pci/devices/") and path.endswith("/vendor")


def _render_access() -> str:
    """ "denied" when no render node may be opened by this user, "" when one may or there is none."""
    nodes = glob.glob("/dev/dri/renderD*")
    return "denied" if nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes) else ""
