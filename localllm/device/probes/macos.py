"""Read a Mac: one sysctl call, ioreg for the GPU's bin, Metal through ctypes for its memory budget. Not root."""

from __future__ import annotations

import ctypes

from localllm.device.probes.commands import run

_KEYS = (
    "machdep.cpu.brand_string",
    "hw.model",
    "hw.memsize",
    "hw.physicalcpu",
    "hw.ncpu",
    "iogpu.wired_limit_mb",
    "kern.memorystatus_vm_pressure_level",
    "sysctl.proc_translated",
)


def outputs() -> dict[str, str]:
    """Everything a Mac is identified from. system_profiler (about 260 ms) only where ioreg gives no core count."""
    found = {
        "sysctl": run("/usr/sbin/sysctl", *_KEYS),
        "ioreg": run("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1"),
        "vm_stat": run("/usr/bin/vm_stat"),
        "metal": metal(),
    }
    if "gpu-core-count" not in found["ioreg"]:
        found["system_profiler"] = run("/usr/sbin/system_profiler", "SPDisplaysDataType", "-json", timeout_s=10.0)
    return {name: text for name, text in found.items() if text}


def metal() -> str:
    """Metal's budget as "recommendedMaxWorkingSetSize = N bytes", "" where there is no Metal device (ssh, a VM).

    Only Metal knows the default budget: no sysctl and no system_profiler key has it. On arm64 objc_msgSend must be
    called through an exact prototype.
    """
    try:
        objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
        framework = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
        framework.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
        objc.sel_registerName.restype = ctypes.c_void_p
        objc.sel_registerName.argtypes = [ctypes.c_char_p]
        send = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
        device = framework.MTLCreateSystemDefaultDevice()
        if not device:
            return ""
        size = send(device, objc.sel_registerName(b"recommendedMaxWorkingSetSize"))
    except (OSError, AttributeError):
        return ""
    return f"recommendedMaxWorkingSetSize = {size} bytes"
