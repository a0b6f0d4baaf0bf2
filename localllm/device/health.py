"""Turn facts into the checks of `doctor`. A check without data is "not checked", never "ok"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from localllm.device import ggml
from localllm.device.accelerators import compiled_in
from localllm.device.types import GIB, Device, Finding

GB = 10**9  # Decimal, as in `localllm device` and in plans.
Status = Literal["ok", "warning", "error", "not checked"]

# A 7B model in Q4 with its context needs about 5 GB. A download needs twice its size while it is
# verified.
_MIN_FREE_DISK_BYTES = 10 * GIB
# Each client uses a socket and each model file a handle. 1024 is Linux's default and is enough.
_MIN_OPEN_FILES = 1024


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """The llama.cpp that workers run: its release and the library files it contains.

    - `title`: "llama-cpp-python 0.3.36", or "llama.cpp 1.0.0 in FOLDER".
    - `cuda_architectures`: the compute capabilities × 10 of its CUDA code (120 = sm_120), sorted.
      The tuple is empty if they could not be read.
    - `is_wheel`: False for libraries that LLAMA_CPP_LIB_PATH or `setup --engine` put in place of
      the wheel's.
    """

    title: str
    libraries: tuple[str, ...]
    cuda_architectures: tuple[int, ...] = ()
    is_wheel: bool = True

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Backends compiled in, found by ggml's library names (libggml-cuda.so, ggml-vulkan.dll
        …)."""
        return compiled_in(" ".join(self.libraries))


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """The facts that were read. None or an absent key means that a fact could not be read here.

    `other_engines` maps a kind of accelerator to the version of the installed engine for it.
    llama.cpp is not among them.
    """

    build: BuildFacts | None = None
    llama_cpp: ggml.GgmlBuild | None = None
    other_engines: Mapping[str, str] = field(default_factory=dict)
    disk_free_bytes: Mapping[str, int] = field(default_factory=dict)
    open_files: int | None = None
    swap: tuple[int, int] | None = None
    pressure: str | None = None
    platform_profile: str | None = None
    on_battery: bool | None = None
    pmset: str | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One check of doctor, its result, and the command that fixes it ("" = no fix needed)."""

    name: str
    status: Status
    message: str
    fix: str = ""


def health_checks(device: Device, facts: HealthFacts) -> list[HealthCheck]:
    """Return every check, in the order in which a user would fix them."""
    files_check = _build(device, facts)
    is_wheel = facts.build is None or facts.build.is_wheel
    device_checks = _build_devices(device, facts.llama_cpp, _SETUP if is_wheel else _GO_BACK)
    has_failed = facts.llama_cpp is not None and facts.llama_cpp.failure
    if files_check.status == "error" and not has_failed:
        # An error already shown by the build's files is not repeated for its devices.
        device_checks = [check for check in device_checks if check.status != "error"]
    return [
        _device_check(device),
        *_finding_checks("device", device.findings),
        files_check,
        *device_checks,
        *_gpu_share(device),
        _memory(device),
        _swap(facts),
        _pressure(facts),
        _power(device, facts),
        _disk(facts),
        _files(facts),
    ]


def _device_check(device: Device) -> HealthCheck:
    figure = device.bandwidth_gbps
    usable = f"{device.memory.limit_bytes / 1e9:.1f} GB usable ({'; '.join(device.accounts)})"
    message = f"{device.name}: {usable}, {figure.value:g} GB/s ({figure.basis})"
    if figure.basis == "assumed":
        return HealthCheck("device", "warning", message, "localllm device --measure")
    return HealthCheck("device", "ok", message)


_SETUP = "localllm setup"
_GO_BACK = "localllm setup --use own, and unset LLAMA_CPP_LIB_PATH if you set it"


def _build(device: Device, facts: HealthFacts) -> HealthCheck:
    """Check whether the files of the installed build match the accelerator of this machine."""
    build = facts.build
    accelerator = device.accelerator
    name = "llama.cpp build"
    if build is None:
        message = "llama-cpp-python is not installed: no model can run"
        return HealthCheck(name, "error", message, "pip install llama-cpp-python")
    if not build.libraries:
        message = f"{build.title} lacks its libraries: the installation may be broken"
        fix = _GO_BACK
        if build.is_wheel:
            fix = "pip install --force-reinstall --no-cache-dir llama-cpp-python"
        return HealthCheck(name, "error", message, fix)
    compiled = f"{build.title}, compiled for {', '.join(('cpu', *build.accelerators))}"
    if accelerator in build.accelerators:
        if accelerator == "cuda":
            return _cuda_code(device, build, compiled)
        return HealthCheck(name, "ok", compiled)
    if accelerator == "rocm" and "vulkan" in build.accelerators:
        vulkan = "this GPU uses Vulkan (ROCm would have a faster prefill)"
        return HealthCheck(name, "ok", f"{compiled}: {vulkan}")
    if accelerator in facts.other_engines:
        only_text = f"this Mac's GPU is used by {facts.other_engines[accelerator]} only"
        message = f"{compiled}: {only_text}, so GGUF files run on the CPU"
        return HealthCheck(name, "warning", message, f"localllm setup --backend {accelerator}")
    if accelerator != "cpu":
        message = f"{compiled}, but this machine has {accelerator}, so its GPU is not used"
        return HealthCheck(name, "error", message, _SETUP)
    return HealthCheck(name, "ok", compiled)


# Capabilities that every build should have (requirements.py of the llama.cpp backend), for users.
_CAPABILITIES = {
    "states": "saved prompts",
    "mtp": "MTP drafting",
    "drafters": "EAGLE and DFlash",
    "adapters": "adapters",
    "images": "images",
    "audio": "audio input",
    "embeddings": "embeddings",
    "rewinding": "rewinding",
}


def _build_devices(device: Device, build: ggml.GgmlBuild | None, fix: str) -> list[HealthCheck]:
    """List the build's own devices and their differences from the system's devices. `fix` is for
    capabilities that it lacks."""
    name = "llama.cpp device"
    if build is None:
        unread = "the installed llama.cpp was not queried for its devices"
        return [HealthCheck(name, "not checked", unread)]
    device_checks = [
        HealthCheck(
            name,
            "ok",
            f"{ggml_device.name}: {ggml_device.description}, {_memory_text(ggml_device)}",
        )
        for ggml_device in build.devices
    ]
    missing = [
        HealthCheck(f"llama.cpp {_CAPABILITIES[name]}", "warning", f"off: {why}", fix)
        for name, why in build.lacks.items()
        if name in _CAPABILITIES
    ]
    return (
        device_checks
        + missing
        + _finding_checks("llama.cpp device", ggml.differences(device, build))
    )


def _finding_checks(name: str, findings: Iterable[Finding]) -> list[HealthCheck]:
    """Turn the findings that need action into checks."""
    return [
        HealthCheck(name, finding.level, finding.message, finding.fix)
        for finding in findings
        if finding.level != "info"
    ]


def _memory_text(device: ggml.GgmlDevice) -> str:
    total = f"{device.memory_total_bytes / GB:.1f} GB"
    if device.accelerator == "cpu":  # ggml reports all of it as free.
        return total
    return f"{device.memory_free_bytes / GB:.1f} of {total} free"


def _cuda_code(device: Device, build: BuildFacts, prefix: str) -> HealthCheck:
    """Check whether the build has native CUDA code for this GPU.

    Native code runs within one major version, on GPUs with the same or a newer minor version. Other
    GPUs need PTX or fail.
    """
    name = "llama.cpp build"
    capability = re.fullmatch(r"([0-9]+)\.([0-9])", device.compute_capability)
    if capability is None:
        unread = f"{prefix}: this GPU's compute capability is unknown"
        return HealthCheck(name, "not checked", unread)
    architectures = build.cuda_architectures
    if not architectures:
        unread = f"{prefix}: no architecture names found in its CUDA code"
        return HealthCheck(name, "not checked", unread)
    listed = ", ".join(f"sm_{architecture}" for architecture in architectures)
    major = int(capability[1])
    minor = int(capability[2])
    if any(a // 10 == major and a % 10 <= minor for a in architectures):
        return HealthCheck(name, "ok", f"{prefix} ({listed})")
    problem = f"this GPU is sm_{major}{minor}, so it starts slowly or fails"
    return HealthCheck(name, "error", f"{prefix} for {listed}, but {problem}", _SETUP)


def _gpu_share(device: Device) -> list[HealthCheck]:
    """Report the share of RAM that the GPU may use, if a system setting limits it."""
    memory = device.memory
    share_text = (
        f"the GPU may use {memory.limit_bytes / GB:.1f} of {memory.total_bytes / GB:.1f} GB"
    )
    if device.accelerator == "metal":
        raised_mib = (memory.total_bytes - max(8 * GIB, memory.total_bytes // 16)) // (1 << 20)
        if raised_mib * (1 << 20) > memory.limit_bytes and memory.total_bytes >= 32 * GIB:
            share_text += (
                f" (until the next restart more: sudo sysctl iogpu.wired_limit_mb={raised_mib})"
            )
        if memory.basis == "assumed":
            unread = f"{share_text}, assumed: Metal could not be queried"
            return [HealthCheck("wired limit", "not checked", unread)]
        return [HealthCheck("wired limit", "ok", share_text)]
    if device.kind != "unified" or device.accelerator not in ("rocm", "vulkan"):
        return []
    # A small limit is already among the findings, with its fix.
    is_found = any("GTT" in finding.message for finding in device.findings)
    if is_found or not device.os.startswith("Linux"):
        return []
    return [HealthCheck("GTT limit", "ok", share_text)]


def _memory(device: Device) -> HealthCheck:
    available_bytes = device.memory.available_bytes
    limit_bytes = device.memory.limit_bytes
    free_text = f"{available_bytes / GB:.1f} of {limit_bytes / GB:.1f} GB are free for a model now"
    if available_bytes < limit_bytes / 2:
        message = f"{free_text}; other programs use the rest"
        return HealthCheck("memory", "warning", message, "close programs that you don't need")
    return HealthCheck("memory", "ok", free_text)


def _swap(facts: HealthFacts) -> HealthCheck:
    if not facts.swap:
        return HealthCheck("swap", "not checked", "swap could not be read")
    total, used = facts.swap
    if not total:
        no_swap = "no swap: a load that does not fit fails instead of slowing everything down"
        return HealthCheck("swap", "ok", no_swap)
    in_use = f"{used / GB:.1f} of {total / GB:.1f} GB of swap are in use"
    if used > total / 2:
        slow = f"{in_use}; a swapped model is tens of times slower"
        return HealthCheck("swap", "warning", slow, "close programs")
    return HealthCheck("swap", "ok", in_use)


def _pressure(facts: HealthFacts) -> HealthCheck:
    name = "memory pressure"
    match = re.search(r"some avg10=([0-9]+\.[0-9]+)", facts.pressure or "")
    if match is None:
        unread = "this system does not report stalls (/proc/pressure/memory)"
        return HealthCheck(name, "not checked", unread)
    message = f"programs waited for memory {match[1]} % of the last 10 s"
    if float(match[1]) > 5:
        return HealthCheck(name, "warning", message, "close programs, or choose a smaller model")
    return HealthCheck(name, "ok", message)


def _power(device: Device, facts: HealthFacts) -> HealthCheck:
    name = "power"
    if facts.on_battery:
        battery = "on battery, so speeds are below the plan"
        return HealthCheck(name, "warning", battery, "connect the charger")
    if device.os == "macOS":
        if facts.pmset is None:
            return HealthCheck(name, "not checked", "pmset did not answer")
        # macOS 26 calls the setting powermode: 0 automatic, 1 low, 2 high.
        low = re.search(r"\b(lowpowermode|powermode)\s+1\b", facts.pmset)
        if low is None:
            return HealthCheck(name, "ok", "Low Power Mode is off")
        slow = "Low Power Mode is on for a power source"
        return HealthCheck(name, "warning", slow, f"sudo pmset -a {low[1]} 0")
    profile = (facts.platform_profile or "").strip()
    if not profile:
        return HealthCheck(name, "not checked", "this system has no power profile")
    message = f"the power profile is {profile}"
    if profile in ("low-power", "quiet", "cool"):
        return HealthCheck(name, "warning", message, "powerprofilesctl set performance")
    return HealthCheck(name, "ok", message)


def _disk(facts: HealthFacts) -> HealthCheck:
    if not facts.disk_free_bytes:
        return HealthCheck("disk", "not checked", "free disk space could not be read")
    name, free_bytes = min(facts.disk_free_bytes.items(), key=itemgetter(1))
    message = f"{free_bytes / GB:.0f} GB free for {name}"
    if free_bytes < _MIN_FREE_DISK_BYTES:
        warning = f"{message}: a download may not fit"
        return HealthCheck("disk", "warning", warning, "localllm models du")
    return HealthCheck("disk", "ok", message)


def _files(facts: HealthFacts) -> HealthCheck:
    name = "file limit"
    n_files = facts.open_files
    if n_files is None:
        return HealthCheck(name, "not checked", "this system has no such limit")
    if not 0 <= n_files < 1 << 62:
        return HealthCheck(name, "ok", "unlimited open files are allowed")
    if n_files < _MIN_OPEN_FILES:
        return HealthCheck(
            name, "warning", f"only {n_files} open files are allowed", "ulimit -n 4096"
        )
    return HealthCheck(name, "ok", f"{n_files} open files are allowed")
