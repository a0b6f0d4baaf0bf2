"""Read NVIDIA GPUs through nvidia-ml-py, or nvidia-smi if NVML is missing.

Each NVML call is made separately, because any of them may fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from localllm.device.parsers.gpus import SMI_FIELDS
from localllm.device.probes import run

_WSL_FOLDER = "/usr/lib/wsl/lib"


def outputs() -> dict[str, str]:
    """Return the output of NVML, or of nvidia-smi if NVML gives no output, by name."""
    readings = {"nvml": nvml()}
    if not readings["nvml"]:
        readings = {"nvidia-smi": smi()}
    return {name: text for name, text in readings.items() if text}


def nvml() -> str:
    """Return every GPU as JSON, or "" if NVML cannot be loaded or started.

    No CUDA context is opened, because that would cost memory.
    """
    gpus: list[dict[str, Any]] | None = None
    with session() as api:
        if api is not None:
            gpus = [_gpu(api, index) for index in range(int(api.nvmlDeviceGetCount()))]
    if gpus is None:
        return ""
    return json.dumps([gpu for gpu in gpus if gpu])


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """Provide NVML's functions for the block, or None without an NVIDIA driver.

    An NVML error inside the block ends the block and is not raised.
    """
    # Checked before the import, which would take 10 ms of every start.
    if sys.platform == "linux" and "pynvml" not in sys.modules and not _has_driver():
        yield None
        return
    import pynvml as api

    # WSL keeps the library outside the loader's path. After this load, it is found by name.
    with contextlib.suppress(OSError):
        ctypes.CDLL(f"{_WSL_FOLDER}/libnvidia-ml.so.1", mode=ctypes.RTLD_GLOBAL)
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
    if isinstance(value, bytes):
        return value.decode()
    return value


def _has_driver() -> bool:
    """Return True if the driver's library can be loaded.

    It is searched by the name that `pynvml` uses, and in WSL's folder.
    """
    for name in ("libnvidia-ml.so.1", f"{_WSL_FOLDER}/libnvidia-ml.so.1"):
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def _bus_id(info: Any) -> str:
    return text(info.busId)


def _current_mode(modes: Sequence[int]) -> int:
    """Return the current mode of a pair of current and pending mode."""
    return int(modes[0])


# Queries for each GPU: our name, NVML's function, and the conversion of its answer.
_NVML_FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("nvmlDeviceGetName", text),
    "uuid": ("nvmlDeviceGetUUID", text),
    "pci": ("nvmlDeviceGetPciInfo", _bus_id),
    "mig": ("nvmlDeviceGetMigMode", _current_mode),
    "capability": ("nvmlDeviceGetCudaComputeCapability", tuple),
    "bus_bits": ("nvmlDeviceGetMemoryBusWidth", int),
    "addressing": ("nvmlDeviceGetAddressingMode", int),
    "power_limit_mw": ("nvmlDeviceGetEnforcedPowerLimit", int),
    "default_power_limit_mw": ("nvmlDeviceGetPowerManagementDefaultLimit", int),
}


def _gpu(api: Any, index: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    # AttributeError: the driver or nvidia-ml-py is too old for the call.
    expected_errors = (api.NVMLError, AttributeError, ValueError)
    try:
        handle = api.nvmlDeviceGetHandleByIndex(index)
    except api.NVMLError:  # The GPU is lost or excluded. The others still count.
        return fields
    for key, (name, read_value) in _NVML_FIELDS.items():
        with contextlib.suppress(*expected_errors):
            fields[key] = read_value(getattr(api, name)(handle))
    with contextlib.suppress(*expected_errors):
        fields["cc_major"], fields["cc_minor"] = fields.pop("capability", ())
    with contextlib.suppress(*expected_errors):
        fields["max_memory_mhz"] = api.nvmlDeviceGetMaxClockInfo(handle, api.NVML_CLOCK_MEM)
    memory = None
    with contextlib.suppress(*expected_errors):
        memory = api.nvmlDeviceGetMemoryInfo(handle, version=api.nvmlMemory_v2)
        fields["reserved"] = memory.reserved
    with contextlib.suppress(api.NVMLError):
        memory = memory or api.nvmlDeviceGetMemoryInfo(handle)
        fields |= {"total": memory.total, "used": memory.used, "free": memory.free}
    if fields.get("mig"):
        fields["slices"] = _slices(api, handle)
    return fields


def _slices(api: Any, handle: Any) -> list[int]:
    """Return the memory bytes of each MIG device, as far as they can be read."""
    sizes: list[int] = []
    with contextlib.suppress(api.NVMLError, AttributeError):
        for index in range(int(api.nvmlDeviceGetMaxMigDeviceCount(handle))):
            with contextlib.suppress(api.NVMLError):
                mig_device = api.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                sizes.append(int(api.nvmlDeviceGetMemoryInfo(mig_device).total))
    return sizes


def energy() -> list[tuple[str, float]]:
    """Return the joules used by each GPU since its driver was loaded, with a name for the GPU."""
    joules: list[tuple[str, float]] = []
    with session() as api:
        for index in range(api.nvmlDeviceGetCount() if api is not None else 0):
            millijoules = api.nvmlDeviceGetTotalEnergyConsumption(
                api.nvmlDeviceGetHandleByIndex(index)
            )
            joules.append((f"nvidia-{index}", millijoules / 1000))
    return joules


def smi() -> str:
    """Return nvidia-smi's CSV with its header, or "" without nvidia-smi."""
    program = shutil.which("nvidia-smi") or f"{_WSL_FOLDER}/nvidia-smi"
    if not Path(program).exists():
        return ""
    return run(program, f"--query-gpu={SMI_FIELDS}", "--format=csv")
