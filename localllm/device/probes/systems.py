"""Read a machine once, by its operating system, without root, torch or a CUDA context."""

from __future__ import annotations

import ctypes
import glob
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from localllm.device.accelerators import HIDING_VARIABLES
from localllm.device.probes import nvidia, read_text, run
from localllm.device.types import DeviceUnreadableError, Readings
from localllm.memory.linux import files_to_read
from localllm.memory.system import SystemMemory

# Variables that hide GPUs from programs started here, and CUDA's order of GPUs.
_ENVIRONMENT = (*HIDING_VARIABLES, "CUDA_DEVICE_ORDER")


def environment() -> dict[str, str]:
    """Return the variables that select GPUs as lines "NAME=value", or {} if all are unset."""
    lines = [f"{name}={os.environ[name]}" for name in _ENVIRONMENT if name in os.environ]
    if lines:
        return {"environment": "\n".join(lines)}
    return {}


# --- Linux

_LINUX_FILES = (
    "/proc/meminfo", "/proc/cpuinfo", "/proc/version", "/proc/device-tree/model",
    "/proc/self/cgroup",
    "/.dockerenv", "/run/udev/data/+dmi:id", "/sys/class/dmi/id/product_name",
    "/var/lib/nvpmodel/status",
)  # fmt: skip
_LINUX_PATTERNS = (
    "/sys/class/kfd/kfd/topology/nodes/*/properties",
    "/sys/class/kfd/kfd/topology/nodes/*/mem_banks/0/properties",
    "/sys/devices/system/cpu/cpu0/cache/index*/size",
)
_CARD_FILES = (
    "vendor", "device", "revision", "class", "product_name", "board_info", "mem_info_vram_total",
    "mem_info_vram_used", "mem_info_vram_vendor", "mem_info_gtt_total", "mem_info_gtt_used",
    "lmem_total_bytes", "uevent",
)  # fmt: skip


def linux_readings(architecture: str) -> Readings:
    """Return all readings needed to identify a Linux machine."""
    files = _read_all(_paths_to_read())
    files |= _read_all(files_to_read(files.get("/proc/self/cgroup", "")))
    vendors = {text.strip() for path, text in files.items() if path.endswith("/vendor")}
    outputs = environment()
    outputs |= nvidia.outputs()
    if "0x1002" in vendors:
        files |= _read_all(["/usr/share/libdrm/amdgpu.ids"])
        outputs["render-access"] = _render_access()
    # vulkaninfo loads every driver (100 ms or more). It runs only for Intel GPUs without NVML, when
    # it may be the only source of a card's name.
    if "0x8086" in vendors and "nvml" not in outputs and shutil.which("vulkaninfo"):
        outputs["vulkaninfo"] = run("vulkaninfo", "--summary", timeout_s=2.0)
    return Readings("linux", architecture, files, outputs)


def _read_all(paths: Iterable[str]) -> dict[str, str]:
    """Return the text of the files that can be read."""
    texts = {path: read_text(path) for path in paths}
    return {path: text for path, text in texts.items() if text is not None}


def _paths_to_read() -> Iterator[str]:
    yield from _LINUX_FILES
    for pattern in _LINUX_PATTERNS:
        yield from glob.glob(pattern)
    for card in glob.glob("/sys/class/drm/card[0-9]*/device"):
        if "-" not in card.split("/")[4]:  # card0-DP-1 is a connector.
            yield from (f"{card}/{name}" for name in _CARD_FILES)
    for device in glob.glob("/sys/bus/pci/devices/*"):
        yield from (f"{device}/vendor", f"{device}/class")


def _render_access() -> str:
    """Return "denied" if there are render nodes and this user may open none of them, else ""."""
    nodes = glob.glob("/dev/dri/renderD*")
    if nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes):
        return "denied"
    return ""


# --- macOS

_SYSCTL_KEYS = (
    "machdep.cpu.brand_string", "hw.model", "hw.memsize", "hw.physicalcpu", "hw.ncpu",
    "iogpu.wired_limit_mb",
    "kern.memorystatus_vm_pressure_level", "kern.memorystatus_level", "sysctl.proc_translated",
)  # fmt: skip


def macos_outputs() -> dict[str, str]:
    """Return all outputs needed to identify a Mac.

    system_profiler (about 260 ms) runs only if ioreg gives no core count.
    """
    outputs = {
        "sysctl": run("/usr/sbin/sysctl", *_SYSCTL_KEYS),
        "ioreg": run("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1"),
        "vm_stat": run("/usr/bin/vm_stat"),
        "metal": metal(),
    }
    if "gpu-core-count" not in outputs["ioreg"]:
        outputs["system_profiler"] = run(
            "/usr/sbin/system_profiler", "SPDisplaysDataType", "-json", timeout_s=10.0
        )
    return {name: text for name, text in outputs.items() if text}


def metal(load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Return Metal's memory limit as "recommendedMaxWorkingSetSize = N bytes".

    Returns "" without a Metal device (a VM). Only Metal knows the default limit: no key of sysctl
    or system_profiler has it.

    MTLCreateSystemDefaultDevice returns nil in a program that does not link CoreGraphics (according
    to Apple's documentation), so CoreGraphics is loaded first. If there is still no default device
    (over ssh), MTLCopyAllDevices lists the devices. On arm64, objc_msgSend must be called through
    an exact prototype.
    """
    try:
        load("/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics")
        objc = load("/usr/lib/libobjc.A.dylib")
        framework = load("/System/Library/Frameworks/Metal.framework/Metal")
        objc.sel_registerName.restype = ctypes.c_void_p
        objc.sel_registerName.argtypes = [ctypes.c_char_p]

        def send(
            receiver: int, message: bytes, *arguments: int, restype: Any = ctypes.c_uint64
        ) -> int:
            call = objc.objc_msgSend
            call.restype = restype
            argument_types = [ctypes.c_uint64] * len(arguments)
            call.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *argument_types]
            return int(call(receiver, objc.sel_registerName(message), *arguments) or 0)

        framework.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        device = framework.MTLCreateSystemDefaultDevice()
        if not device:
            framework.MTLCopyAllDevices.restype = ctypes.c_void_p
            devices = framework.MTLCopyAllDevices()
            if not devices or not send(devices, b"count"):
                return ""
            device = send(devices, b"objectAtIndex:", 0, restype=ctypes.c_void_p)
        size_bytes = 0
        if device:
            size_bytes = send(device, b"recommendedMaxWorkingSetSize")
    except (OSError, AttributeError):
        return ""
    if not size_bytes:
        return ""
    return f"recommendedMaxWorkingSetSize = {size_bytes} bytes"


# --- Windows

_DISPLAY_CLASS = (
    r"HKLM\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
)
_PROCESSOR_KEY = r"HKLM\HARDWARE\DESCRIPTION\System\CentralProcessor\0"
_MODULES_QUERY = (
    "Get-CimInstance Win32_PhysicalMemory | "
    "Select-Object "
    "Capacity,ConfiguredClockSpeed,Speed,SMBIOSMemoryType,DataWidth,BankLabel,DeviceLocator | "
    "ConvertTo-Json"
)


def windows_outputs() -> dict[str, str]:
    """Return all outputs needed to identify a Windows machine. No administrator rights are
    needed."""
    memory = SystemMemory()
    outputs = {
        "memory-status": (
            f"ullTotalPhys: {memory.total_bytes}\nullAvailPhys: {memory.available_bytes()}\n"
        ),
        "display-class": run("reg", "query", _DISPLAY_CLASS, "/s"),
        "processor": run("reg", "query", _PROCESSOR_KEY, "/v", "ProcessorNameString"),
        "cores": str(os.cpu_count() or ""),
        # Set only in an emulated process, to the machine's real architecture.
        "native-architecture": os.environ.get("PROCESSOR_ARCHITEW6432", ""),
    }
    return environment() | nvidia.outputs() | {name: text for name, text in outputs.items() if text}


def physical_memory() -> dict[str, str]:
    """Return the memory sticks through CIM, as JSON.

    This takes half a second, so it is not part of `windows_outputs`.
    """
    text = run(
        "powershell", "-NoProfile", "-NonInteractive", "-Command", _MODULES_QUERY, timeout_s=20.0
    )
    if text:
        return {"physical-memory": text}
    return {}


def read(*, slow: bool = False) -> Readings:
    """Read this machine once, in well under 300 ms, without root, torch or a CUDA context.

    `slow` adds readings that take longer: the memory sticks on Windows, through CIM.
    """
    architecture = platform.machine()
    if sys.platform == "darwin":
        return Readings("macos", architecture, {}, macos_outputs())
    if sys.platform == "win32":
        outputs = windows_outputs()
        return Readings("windows", architecture, {}, outputs | (physical_memory() if slow else {}))
    if sys.platform.startswith("linux"):
        return linux_readings(architecture)
    raise DeviceUnreadableError(
        f"this system ({sys.platform}) is not supported; localllm supports Linux, macOS and Windows"
    )
