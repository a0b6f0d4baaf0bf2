"""Compare the devices reported by the installed build of llama.cpp with the probed ones.

The probes know the machine, and ggml knows the devices that its build will use. If they differ, a
plan for the machine is not what will run. So every difference becomes a finding. These functions do
no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from localllm.device import accelerators
from localllm.device.accelerators import KINDS
from localllm.device.types import Accelerator, Device, Finding

_GPU_TYPES = ("gpu", "igpu")
# Largest difference in size that a driver's own use explains. If the two sizes differ by more, they
# do not describe the same memory.
_SAME_MEMORY = 0.08


@dataclass(frozen=True, slots=True)
class GgmlDevice:
    """One device of a build, as ggml describes it.

    - `largest_buffer_bytes`: the size limit of one allocation, or None if ggml reports no limit.
    - `id`: the PCI address, if there is one.
    - `details`: properties that the backend logged about the device.
    """

    name: str
    description: str
    backend: str
    type: str
    memory_free_bytes: int
    memory_total_bytes: int
    largest_buffer_bytes: int | None = None
    id: str = ""
    capabilities: tuple[str, ...] = ()
    details: tuple[str, ...] = ()

    @property
    def accelerator(self) -> Accelerator:
        """Our name of the accelerator that drives it: "cpu" for the CPU and its helpers (BLAS)."""
        if self.type not in _GPU_TYPES:
            return "cpu"
        return accelerators.kind_of_backend(self.backend) or "cpu"


@dataclass(frozen=True, slots=True)
class GgmlBuild:
    """A build of llama.cpp and its devices. `failure` is the reason if the query failed.

    - `lacks`: for each capability that is off, the missing function or field and its file.
    """

    version: str = ""
    folder: str = ""
    devices: tuple[GgmlDevice, ...] = ()
    features: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    failure: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Its release, such as "llama-cpp-python 0.3.36" or "llama.cpp 1.0.0"."""
        # The version of a library that replaces the wheel's has the library's name before it.
        library, _, number = self.version.partition(" ")
        if not number:
            return f"llama-cpp-python {library or 'of an unknown version'}"
        if library == "llama":
            return f"llama.cpp {number}"
        return f"llama.cpp ({self.version})"

    @property
    def gpus(self) -> tuple[GgmlDevice, ...]:
        """Devices other than the CPU."""
        return tuple(device for device in self.devices if device.accelerator != "cpu")

    @property
    def accelerators(self) -> tuple[Accelerator, ...]:
        """Accelerators of its devices, without the CPU."""
        return tuple(dict.fromkeys(device.accelerator for device in self.gpus))

    @property
    def kind(self) -> str:
        """Its accelerators as one word, such as "cuda" or "vulkan", or "cpu" without
        accelerators."""
        return "+".join(self.accelerators) or "cpu"


def read(answer: Mapping[str, Any]) -> GgmlBuild:
    """Parse the child process's JSON, or the output of `to_json`, into a GgmlBuild.

    Raises KeyError, TypeError or ValueError for any other data.
    """
    log_lines = [str(line) for line in answer.get("said", ())]
    devices = tuple(_device(device, log_lines) for device in answer["devices"])
    features = {}
    for name, values in answer["features"].items():
        features[str(name)] = {str(key): str(value) for key, value in values.items()}
    capabilities = answer.get("capabilities", {})
    lacks = {str(name): str(missing) for name, missing in capabilities.items() if missing}
    return GgmlBuild(str(answer["version"]), str(answer["folder"]), devices, features, lacks=lacks)


def _device(device: Mapping[str, Any], log: list[str]) -> GgmlDevice:
    name = str(device["name"])
    largest = device["largest_buffer_bytes"]
    details = tuple(str(detail) for detail in device.get("details", ()))
    capabilities = tuple(str(capability) for capability in device["capabilities"])
    return GgmlDevice(
        name=name,
        description=str(device["description"]),
        backend=str(device["backend"]),
        type=str(device["type"]),
        memory_free_bytes=int(device["memory_free_bytes"]),
        memory_total_bytes=int(device["memory_total_bytes"]),
        largest_buffer_bytes=int(largest) if largest is not None else None,
        id=str(device["id"] or ""),
        capabilities=capabilities,
        details=details or _details(name, log),
    )


def _details(name: str, log_lines: list[str]) -> tuple[str, ...]:
    """Return capabilities that appear only in the log.

    Vulkan and CUDA log one line per device, Metal several.
    """
    number = re.sub(r"\D", "", name)
    kind = re.sub(r"[\d ].*", "", name)
    if kind in ("MTL", "Metal"):
        features = [_METAL_FEATURE.match(line) for line in log_lines]
        return tuple(f"{feature[1]}: {feature[2]}" for feature in features if feature)
    if kind not in _DETAIL_LINES:
        return ()
    start, separator = _DETAIL_LINES[kind]
    for line in log_lines:
        if re.match(start.format(number), line):
            return tuple(part.strip() for part in line.split(separator)[1:])
    return ()


# Prefix of a backend's log line for a device, and the separator between its capabilities.
_DETAIL_LINES = {
    "Vulkan": (r"ggml_vulkan: {} = ", "|"),
    "CUDA": (r"\s*Device {}: ", ","),
    "ROCm": (r"\s*Device {}: ", ","),
}
_METAL_FEATURE = re.compile(r"ggml_metal_device_init: ((?:simdgroup|has|use) .*?)\s*= (\w+)")


def driving_accelerator(device: Device, build: GgmlBuild) -> Accelerator:
    """Return the accelerator that would run a model on `device` with this build.

    It is the device's own backend, another one that can drive it, or "cpu".
    """
    kind = device.accelerator
    return next(
        (
            accelerator
            for accelerator in (kind, *KINDS[kind].instead)
            if accelerator in build.accelerators
        ),
        "cpu",
    )


def differences(device: Device, build: GgmlBuild) -> list[Finding]:
    """Return a finding with a fix for each difference between the build's and the probed
    devices."""
    if build.failure:
        failure_message = f"the installed llama.cpp did not list its devices: {build.failure}"
        fix = "localllm setup"
        if "/builds/" in build.folder:
            fix = "localllm setup --use own"
        return [Finding("error", failure_message, fix)]
    if device.accelerator == "cpu":
        names = ", ".join(gpu.description for gpu in build.gpus)
        if not names:
            return []
        unknown = f"{names}, which the system's own tools did not report"
        return [Finding("warning", f"the installed llama.cpp found {unknown}")]
    driver = driving_accelerator(device, build)
    if driver == "cpu":
        return [_unused(device, build)]
    used = [gpu for gpu in build.gpus if gpu.accelerator == driver]
    findings = []
    if len(used) != device.n_gpus:
        message = (
            f"the system reports {device.n_gpus} GPU(s), "
            f"but the installed llama.cpp uses {len(used)}"
        )
        fix = "check the environment for CUDA_VISIBLE_DEVICES and similar variables"
        findings.append(Finding("warning", message, fix))
    if driver != device.accelerator:
        cause = f"the installed llama.cpp lacks {device.accelerator}"
        message = f"{device.name} is used through {driver}, because {cause}"
        fix = f"localllm setup --backend {device.accelerator}"
        findings.append(Finding("info", message, fix))
    return findings + _memory(device, used)


def _unused(device: Device, build: GgmlBuild) -> Finding:
    compiled = [name for name in build.features if accelerators.kind_of_backend(name)]
    reason = "is a CPU build"
    if compiled:
        reason = f"was compiled for {', '.join(compiled)} but finds no device: check the driver"
    message = f"{device.name} is not used: the installed llama.cpp {reason}"
    return Finding("error", message, "localllm setup")


def _memory(device: Device, used: list[GgmlDevice]) -> list[Finding]:
    """Compare a GPU's memory in the driver and in ggml, and report small allocation limits."""
    findings = []
    total_bytes = sum(gpu.memory_total_bytes for gpu in used)
    limit_bytes = device.memory.limit_bytes
    # On unified memory, the driver may offer ggml less than the system would give. It never offers
    # more than plans assume.
    is_low = total_bytes < (1 - _SAME_MEMORY) * limit_bytes
    is_high = (
        device.kind == "discrete" and total_bytes > (1 + _SAME_MEMORY) * device.memory.total_bytes
    )
    if total_bytes and (is_low or is_high):
        usable_text = f"the system reports {limit_bytes / 1e9:.1f} GB as usable"
        message = f"{usable_text}, but the installed llama.cpp reports {total_bytes / 1e9:.1f} GB"
        findings.append(
            Finding("warning", f"{message}; a plan between the two figures may fail to load")
        )
    largest_buffers = {gpu.name: gpu.largest_buffer_bytes for gpu in used}
    for name, n_bytes in largest_buffers.items():
        if n_bytes is None or n_bytes >= limit_bytes / max(device.n_gpus, 1):
            continue
        message = f"{name}: one allocation can have {n_bytes / 1e9:.1f} GB at most"
        findings.append(Finding("info", f"{message}, although it has more memory"))
    return findings


def to_json(build: GgmlBuild) -> dict[str, Any]:
    """Return the published JSON form of a GgmlBuild."""
    return {
        "version": build.version,
        "folder": build.folder,
        "failure": build.failure or None,
        "devices": [
            {**asdict(device), "accelerator": device.accelerator, "id": device.id or None}
            for device in build.devices
        ],
        "features": {name: dict(values) for name, values in build.features.items()},
        "capabilities": dict(build.lacks),
    }
