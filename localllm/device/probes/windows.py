"""Read a Windows machine: GlobalMemoryStatusEx, two registry keys, NVML; CIM only when asked (PowerShell is slow)."""

from __future__ import annotations

import ctypes
import os

from localllm.device.probes import nvidia
from localllm.device.probes.commands import run

_DISPLAY_CLASS = r"HKLM\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
_PROCESSOR = r"HKLM\HARDWARE\DESCRIPTION\System\CentralProcessor\0"
_STICKS = (
    "Get-CimInstance Win32_PhysicalMemory | "
    "Select-Object Capacity,ConfiguredClockSpeed,Speed,SMBIOSMemoryType,BankLabel,DeviceLocator | ConvertTo-Json"
)


class _MemoryStatusEx(ctypes.Structure):
    _fields_ = (
        ("dwLength", ctypes.c_uint32),
        ("dwMemoryLoad", ctypes.c_uint32),
        ("ullTotalPhys", ctypes.c_uint64),
        ("ullAvailPhys", ctypes.c_uint64),
        ("ullTotalPageFile", ctypes.c_uint64),
        ("ullAvailPageFile", ctypes.c_uint64),
        ("ullTotalVirtual", ctypes.c_uint64),
        ("ullAvailVirtual", ctypes.c_uint64),
        ("ullAvailExtendedVirtual", ctypes.c_uint64),
    )


def outputs() -> dict[str, str]:
    """Everything a Windows machine is identified from, no administrator needed."""
    found = {
        "memory-status": _memory_status(),
        "display-class": run("reg", "query", _DISPLAY_CLASS, "/s"),
        "processor": run("reg", "query", _PROCESSOR, "/v", "ProcessorNameString"),
        "nvml": nvidia.nvml(),
        "cores": str(os.cpu_count() or ""),
        # Set only in an emulated process: what the machine really is.
        "native-architecture": os.environ.get("PROCESSOR_ARCHITEW6432", ""),
    }
    if not found["nvml"]:
        found["nvidia-smi"] = nvidia.smi()
    return {name: text for name, text in found.items() if text}


def physical_memory() -> dict[str, str]:
    """The memory sticks through CIM, as JSON (half a second: not part of `outputs`)."""
    text = run("powershell", "-NoProfile", "-NonInteractive", "-Command", _STICKS, timeout_s=20.0)
    return {"physical-memory": text} if text else {}


def _memory_status() -> str:
    windll = getattr(ctypes, "windll", None)
    if windll is None:
        return ""
    status = _MemoryStatusEx()
    status.dwLength = ctypes.sizeof(status)
    if not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return ""
    return f"ullTotalPhys: {status.ullTotalPhys}\nullAvailPhys: {status.ullAvailPhys}\n"
