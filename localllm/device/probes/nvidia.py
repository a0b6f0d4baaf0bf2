"""NVML through nvidia-ml-py, each call on its own because any of them may fail; nvidia-smi where
NVML is not there."""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localllm.device.parsers.gpus import SMI_FIELDS
from localllm.device.probes import run

_WSL = "/usr/lib/wsl/lib"


def outputs() -> dict[str, str]:
    """What NVML says, or nvidia-smi where that is not there, by its name."""
    said = {"nvml": nvml()}
    if not said["nvml"]:
        said = {"nvidia-smi": smi()}
    return {name: text for name, text in said.items() if text}


def nvml() -> str:
    """Every GPU as JSON, "" when NVML can't be loaded or started. Opens no CUDA context (that would
    cost memory)."""
    if sys.platform == "linux" and "pynvml" not in sys.modules and not _has_driver():
        return ""  # before the module is read: it is 10 ms of every start
    found: list[dict[str, Any]] | None = None
    with session() as api:
        if api is not None:
            found = [_gpu(api, index) for index in range(int(api.nvmlDeviceGetCount()))]
    return "" if found is None else json.dumps([gpu for gpu in found if gpu])


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """NVML's functions for as long as the block runs; None where there is no NVIDIA driver. What
    fails within ends the block, and nothing else."""
    try:
        import pynvml as api
    except ImportError:
        yield None
        return
    # WSL keeps the library off the loader's path; once loaded it is found by name
    with contextlib.suppress(OSError):
        ctypes.CDLL(f"{_WSL}/libnvidia-ml.so.1", mode=ctypes.RTLD_GLOBAL)
    try:
        api.nvmlInit()
    except (api.NVMLError, OSError):
        yield None
        return
    try:
        with contextlib.suppress(api.NVMLError, AttributeError):
            yield api
    finally:
        with contextlib.suppress(api.NVMLError):
            api.nvmlShutdown()


def text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _has_driver() -> bool:
    """Whether the driver's library is to be found, as `pynvml` looks for it or where WSL keeps
    it."""
    for name in ("libnvidia-ml.so.1", f"{_WSL}/libnvidia-ml.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def _gpu(api: Any, index: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def ask(key: str, call: Callable[[], Any]) -> None:
        # AttributeError: a driver or nvidia-ml-py too old for the call.
        with contextlib.suppress(api.NVMLError, AttributeError, ValueError):
            value = call()
            found[key] = text(value) if isinstance(value, bytes) else value

    try:
        handle = api.nvmlDeviceGetHandleByIndex(index)
    except api.NVMLError:  # lost or excluded: the others still count
        return found
    ask("name", lambda: api.nvmlDeviceGetName(handle))
    memory = None
    with contextlib.suppress(api.NVMLError, AttributeError):
        memory = api.nvmlDeviceGetMemoryInfo(handle, version=api.nvmlMemory_v2)
        found["reserved"] = memory.reserved
    with contextlib.suppress(api.NVMLError):
        memory = memory or api.nvmlDeviceGetMemoryInfo(handle)
    if memory is not None:
        found |= {"total": memory.total, "used": memory.used, "free": memory.free}
    capability = None
    with contextlib.suppress(api.NVMLError):
        capability = api.nvmlDeviceGetCudaComputeCapability(handle)
    if capability is not None:
        found["cc_major"], found["cc_minor"] = capability
    ask("uuid", lambda: api.nvmlDeviceGetUUID(handle))
    ask("pci", lambda: api.nvmlDeviceGetPciInfo(handle).busId)
    ask("mig", lambda: int(api.nvmlDeviceGetMigMode(handle)[0]))
    if found.get("mig"):
        found["slices"] = _slices(api, handle)
    ask("bus_bits", lambda: api.nvmlDeviceGetMemoryBusWidth(handle))
    ask("max_memory_mhz", lambda: api.nvmlDeviceGetMaxClockInfo(handle, api.NVML_CLOCK_MEM))
    ask("addressing", lambda: int(api.nvmlDeviceGetAddressingMode(handle)))
    ask("power_limit_mw", lambda: api.nvmlDeviceGetEnforcedPowerLimit(handle))
    ask("default_power_limit_mw", lambda: api.nvmlDeviceGetPowerManagementDefaultLimit(handle))
    return found


def _slices(api: Any, handle: Any) -> list[int]:
    """Bytes of memory of each MIG device, as far as they may be asked."""
    sizes: list[int] = []
    with contextlib.suppress(api.NVMLError, AttributeError):
        for index in range(int(api.nvmlDeviceGetMaxMigDeviceCount(handle))):
            with contextlib.suppress(api.NVMLError):
                slice_ = api.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                sizes.append(int(api.nvmlDeviceGetMemoryInfo(slice_).total))
    return sizes


def smi() -> str:
    """nvidia-smi's CSV with its header; "" where there is none."""
    program = shutil.which("nvidia-smi") or f"{_WSL}/nvidia-smi"
    if not Path(program).exists():
        return ""
    return run(program, f"--query-gpu={SMI_FIELDS}", "--format=csv")
