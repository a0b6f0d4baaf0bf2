"""The judgement behind `doctor`: facts in, checks out. A check that had nothing to look at says so,
never "ok"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.device import ggml
from localllm.device.accelerators import compiled_in
from localllm.device.types import GIB, Device

GB = 10**9  # as `localllm device` and plans count
Status = Literal["ok", "warning", "error", "not checked"]

# A 7B model in Q4 with its context is about 5 GB; a download needs its size twice while it is
# verified.
_LITTLE_DISK_BYTES = 10 * GIB
# Each client is a socket and each model file a handle: 1024 is what Linux gives by default and is
# enough.
_FEW_FILES = 1024


@dataclass(frozen=True, slots=True)
class BuildFacts:
    """The installed llama-cpp-python: version, the library files it carries, architecture strings
    of its CUDA code."""

    version: str
    libraries: tuple[str, ...]
    cuda_strings: tuple[str, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Backends compiled in, by the libraries ggml builds for each (libggml-cuda.so,
        ggml-vulkan.dll …)."""
        return compiled_in(" ".join(self.libraries))

    @property
    def cuda_architectures(self) -> tuple[int, ...]:
        """Compute capabilities × 10 the CUDA code was built for (120 = sm_120), sorted; () if none
        could be read."""
        found: set[int] = set()
        for text in self.cuda_strings:
            if text.startswith("sm_"):
                found.add(int(text[3:]))
            else:  # __CUDA_ARCH_LIST__: 750,860,1200
                found.update(
                    int(part) // 10 for part in text.split(",") if 500 <= int(part) <= 2000
                )
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A running engine worker: its process id, resident bytes, and whether its server is gone."""

    pid: int
    resident_bytes: int
    orphan: bool


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What was read. None (or an absent key) = could not be read here. `other_engines`: those
    beside llama.cpp that are installed, with their version, by the kind of accelerator that they
    are for."""

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
    workers: tuple[WorkerProcess, ...] | None = None


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One thing doctor looked at (or could not), what it saw, and the command that fixes it ("" =
    nothing to fix)."""

    name: str
    status: Status
    message: str
    fix: str = ""


def judge(device: Device, facts: HealthFacts) -> list[HealthCheck]:
    """Every check, in the order a user would fix them."""
    checks = [_found(device)]
    checks += [
        HealthCheck("device", f.level, f.message, f.fix)
        for f in device.findings
        if f.level != "info"
    ]
    of_files = _build(device, facts)
    checks += of_files
    # What the build's files show already need not be said again by its devices.
    known = any(check.status == "error" for check in of_files) and not (
        facts.llama_cpp and facts.llama_cpp.failure
    )
    checks += [
        check for check in _ggml(device, facts.llama_cpp) if check.status != "error" or not known
    ]
    checks += _gpu_share(device)
    checks += [
        _memory(device),
        _swap(facts),
        _pressure(facts),
        _power(device, facts),
        _disk(facts),
        _files(facts),
    ]
    return [*checks, _workers(facts)]


def _found(device: Device) -> HealthCheck:
    said = f"{device.memory.limit_bytes / 1e9:.1f} GB usable ({'; '.join(device.accounts)})"
    figure = device.bandwidth_gbps
    said = f"{device.name}: {said}, {figure.value:g} GB/s ({figure.basis})"
    if figure.basis == "assumed":
        return HealthCheck("device", "warning", said, "localllm device --measure")
    return HealthCheck("device", "ok", said)


_SETUP = "localllm setup"


def _build(device: Device, facts: HealthFacts) -> list[HealthCheck]:
    build = facts.build
    name = "llama.cpp build"
    if build is None:
        return [
            HealthCheck(
                name,
                "error",
                "llama-cpp-python is not installed: no model can run",
                "pip install llama-cpp-python",
            )
        ]
    if not build.libraries:
        message = (
            f"llama-cpp-python {build.version} has no libraries where they belong: it may be broken"
        )
        return [
            HealthCheck(
                name,
                "error",
                message,
                "pip install --force-reinstall --no-cache-dir llama-cpp-python",
            )
        ]
    compiled = build.accelerators
    said = f"llama-cpp-python {build.version}, compiled for {', '.join(('cpu', *compiled))}"
    wanted = device.accelerator
    if wanted == "cpu":
        return [HealthCheck(name, "ok", said)]
    if wanted in compiled:
        return [
            _cuda_code(device, build, said) if wanted == "cuda" else HealthCheck(name, "ok", said)
        ]
    if wanted == "rocm" and "vulkan" in compiled:
        return [
            HealthCheck(
                name, "ok", f"{said}: Vulkan drives this GPU (ROCm would read prompts faster)"
            )
        ]
    if wanted in facts.other_engines:
        message = (
            f"{said}: this Mac's GPU is used by {facts.other_engines[wanted]} only, GGUF "
            "files "
            "run on the CPU"
        )
        return [HealthCheck(name, "warning", message, f"localllm setup --backend {wanted}")]
    message = f"{said}, but this machine has {wanted}: its GPU would sit idle"
    return [HealthCheck(name, "error", message, _SETUP)]


def _ggml(device: Device, build: ggml.GgmlBuild | None) -> list[HealthCheck]:
    """What the build itself says it computes on, and where that is not what the system shows."""
    name = "llama.cpp device"
    if build is None:
        return [
            HealthCheck(
                name, "not checked", "the installed llama.cpp was not asked for its devices"
            )
        ]
    seen = [
        HealthCheck(name, "ok", f"{d.name}: {d.description}, {_memory_of(d)}")
        for d in build.devices
    ]
    found = [
        HealthCheck(name, f.level, f.message, f.fix)
        for f in ggml.differences(device, build)
        if f.level != "info"
    ]
    return [*seen, *found]


def _memory_of(device: ggml.GgmlDevice) -> str:
    if device.accelerator == "cpu":  # ggml says that all of it is free
        return f"{device.memory_total_bytes / GB:.1f} GB"
    return f"{device.memory_free_bytes / GB:.1f} of {device.memory_total_bytes / GB:.1f} GB free"


def _cuda_code(device: Device, build: BuildFacts, said: str) -> HealthCheck:
    """Native code runs within one major version, up to the GPU's minor; anything else needs PTX or
    fails."""
    name, architectures = "llama.cpp build", build.cuda_architectures
    capability = re.fullmatch(r"([0-9]+)\.([0-9])", device.compute_capability)
    if capability is None:
        return HealthCheck(name, "not checked", f"{said}: this GPU's compute capability is unknown")
    if not architectures:
        return HealthCheck(
            name, "not checked", f"{said}: no architecture names found in its CUDA code"
        )
    major, minor = int(capability.group(1)), int(capability.group(2))
    listed = ", ".join(f"sm_{architecture}" for architecture in architectures)
    if any(a // 10 == major and a % 10 <= minor for a in architectures):
        return HealthCheck(name, "ok", f"{said} ({listed})")
    message = (
        f"{said} for {listed}, but this GPU is sm_{major}{minor}: it would be slow to start or fail"
    )
    return HealthCheck(name, "error", message, _SETUP)


def _gpu_share(device: Device) -> list[HealthCheck]:
    """How much of the RAM the system lets the GPU use, where a setting decides it."""
    memory = device.memory
    said = f"the GPU may use {memory.limit_bytes / GB:.1f} of {memory.total_bytes / GB:.1f} GB"
    if device.accelerator == "metal":
        name = "wired limit"
        if memory.basis == "assumed":
            return [HealthCheck(name, "not checked", f"{said}, assumed: Metal could not be asked")]
        raised = (memory.total_bytes - max(8 * GIB, memory.total_bytes // 16)) // (1 << 20)
        if raised * (1 << 20) > memory.limit_bytes and memory.total_bytes >= 32 * GIB:
            said += f" (until the next restart more: sudo sysctl iogpu.wired_limit_mb={raised})"
        return [HealthCheck(name, "ok", said)]
    if (
        device.kind == "unified"
        and device.accelerator in ("rocm", "vulkan")
        and device.os.startswith("Linux")
    ):
        if any("GTT" in finding.message for finding in device.findings):
            return []  # said above, with its fix
        return [HealthCheck("GTT limit", "ok", said)]
    return []


def _memory(device: Device) -> HealthCheck:
    now, limit = device.memory.available_bytes, device.memory.limit_bytes
    said = f"{now / GB:.1f} of {limit / GB:.1f} GB are free for a model now"
    if now < limit / 2:
        return HealthCheck(
            "memory",
            "warning",
            f"{said}: other programs hold the rest",
            "close what you don't need",
        )
    return HealthCheck("memory", "ok", said)


def _swap(facts: HealthFacts) -> HealthCheck:
    if facts.swap is None:
        return HealthCheck("swap", "not checked", "swap could not be read")
    total, used = facts.swap
    if total == 0:
        return HealthCheck(
            "swap", "ok", "no swap: what does not fit fails instead of slowing everything down"
        )
    said = f"{used / GB:.1f} of {total / GB:.1f} GB of swap are in use"
    if used > total / 2:
        return HealthCheck(
            "swap",
            "warning",
            f"{said}: a model that gets swapped is tens of times slower",
            "close programs",
        )
    return HealthCheck("swap", "ok", said)


def _pressure(facts: HealthFacts) -> HealthCheck:
    found = re.search(r"some avg10=([0-9]+\.[0-9]+)", facts.pressure or "")
    if found is None:
        return HealthCheck(
            "memory pressure",
            "not checked",
            "this system does not report stalls (/proc/pressure/memory)",
        )
    stalled = float(found.group(1))
    if stalled > 5:
        message = f"programs waited for memory {stalled:.0f} % of the last 10 s"
        return HealthCheck(
            "memory pressure", "warning", message, "close programs, or choose a smaller model"
        )
    return HealthCheck(
        "memory pressure", "ok", f"programs waited for memory {stalled:.1f} % of the last 10 s"
    )


def _power(device: Device, facts: HealthFacts) -> HealthCheck:
    if facts.on_battery:
        return HealthCheck(
            "power", "warning", "on battery: speeds will be below the plan", "plug in"
        )
    if device.os == "macOS":
        if facts.pmset is None:
            return HealthCheck("power", "not checked", "pmset gave no answer")
        # macOS 26 calls it powermode: 0 automatic, 1 low, 2 high.
        low = re.search(r"\b(lowpowermode|powermode)\s+1\b", facts.pmset)
        if low:
            fix = f"sudo pmset -a {low.group(1)} 0"
            return HealthCheck("power", "warning", "Low Power Mode is on for a power source", fix)
        return HealthCheck("power", "ok", "Low Power Mode is off")
    profile = (facts.platform_profile or "").strip()
    if profile in ("low-power", "quiet", "cool"):
        return HealthCheck(
            "power",
            "warning",
            f"the power profile is {profile}",
            "powerprofilesctl set performance",
        )
    if profile:
        return HealthCheck("power", "ok", f"the power profile is {profile}")
    return HealthCheck("power", "not checked", "this system has no power profile to read")


def _disk(facts: HealthFacts) -> HealthCheck:
    if not facts.disk_free_bytes:
        return HealthCheck("disk", "not checked", "free disk space could not be read")
    name, free = min(facts.disk_free_bytes.items(), key=lambda item: item[1])
    said = f"{free / GB:.0f} GB free for {name}"
    if free < _LITTLE_DISK_BYTES:
        return HealthCheck(
            "disk", "warning", f"{said}: a download may not fit", "localllm models du"
        )
    return HealthCheck("disk", "ok", said)


def _files(facts: HealthFacts) -> HealthCheck:
    if facts.open_files is None:
        return HealthCheck("file limit", "not checked", "this system has no such limit to read")
    if 0 <= facts.open_files < _FEW_FILES:
        return HealthCheck(
            "file limit",
            "warning",
            f"only {facts.open_files} open files are allowed",
            "ulimit -n 4096",
        )
    many = (
        "unlimited"
        if facts.open_files < 0 or facts.open_files >= 1 << 62
        else str(facts.open_files)
    )
    return HealthCheck("file limit", "ok", f"{many} open files are allowed")


def _workers(facts: HealthFacts) -> HealthCheck:
    if facts.workers is None:
        return HealthCheck("stale engine", "not checked", "the process list could not be read")
    stale = [worker for worker in facts.workers if worker.orphan]
    if stale:
        held = sum(worker.resident_bytes for worker in stale) / GB
        pids = " ".join(str(worker.pid) for worker in stale)
        message = f"{len(stale)} engine worker(s) lost their server and hold {held:.1f} GB"
        return HealthCheck("stale engine", "warning", message, f"kill {pids}")
    return HealthCheck(
        "stale engine",
        "ok",
        f"{len(facts.workers)} engine worker(s) running, none without its server",
    )
