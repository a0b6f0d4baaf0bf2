"""The judgement behind `doctor`: facts in, checks out. A check that had nothing to look at says so,
never "ok"."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from localllm.device import ggml
from localllm.device.accelerators import compiled_in
from localllm.device.types import GIB, Device, Finding

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
    """The installed llama-cpp-python: version, the library files it carries, and the compute
    capabilities × 10 its CUDA code was built for (120 = sm_120), sorted; () if none could be
    read."""

    version: str
    libraries: tuple[str, ...]
    cuda_architectures: tuple[int, ...] = ()

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Backends compiled in, by the libraries ggml builds for each (libggml-cuda.so,
        ggml-vulkan.dll …)."""
        return compiled_in(" ".join(self.libraries))


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
    of_files = _build(device, facts)
    # What the build's files show already need not be said again by its devices.
    known = of_files.status == "error" and not (facts.llama_cpp and facts.llama_cpp.failure)
    of_devices = _ggml(device, facts.llama_cpp)
    return [
        _found(device),
        *_of_findings("device", device.findings),
        of_files,
        *(check for check in of_devices if check.status != "error" or not known),
        *_gpu_share(device),
        _memory(device),
        _swap(facts),
        _pressure(facts),
        _power(device, facts),
        _disk(facts),
        _files(facts),
    ]


def _found(device: Device) -> HealthCheck:
    figure = device.bandwidth_gbps
    said = (
        f"{device.name}: {device.memory.limit_bytes / 1e9:.1f} GB usable "
        f"({'; '.join(device.accounts)}), {figure.value:g} GB/s ({figure.basis})"
    )
    assumed = said if figure.basis == "assumed" else ""
    return _seen("device", said, assumed, "localllm device --measure")


_SETUP = "localllm setup"


def _build(device: Device, facts: HealthFacts) -> HealthCheck:
    """Whether the installed build's files are those that this machine needs."""
    build = facts.build
    wanted = device.accelerator
    name = "llama.cpp build"
    if build is None:
        what = "llama-cpp-python is not installed: no model can run"
        return HealthCheck(name, "error", what, "pip install llama-cpp-python")
    said = f"llama-cpp-python {build.version}"
    if not build.libraries:
        what = f"{said} has no libraries where they belong: it may be broken"
        return HealthCheck(
            name, "error", what, "pip install --force-reinstall --no-cache-dir llama-cpp-python"
        )
    said += f", compiled for {', '.join(('cpu', *build.accelerators))}"
    if wanted == "cuda" and wanted in build.accelerators:
        return _cuda_code(device, build, said)
    if wanted == "rocm" and "vulkan" in build.accelerators and wanted not in build.accelerators:
        said += ": Vulkan drives this GPU (ROCm would read prompts faster)"
    elif wanted in facts.other_engines and wanted not in build.accelerators:
        what = f"this Mac's GPU is used by {facts.other_engines[wanted]} only"
        what += ", GGUF files run on the CPU"
        return _seen(name, said, f"{said}: {what}", f"localllm setup --backend {wanted}")
    elif wanted not in ("cpu", *build.accelerators):
        what = f"{said}, but this machine has {wanted}: its GPU would sit idle"
        return HealthCheck(name, "error", what, _SETUP)
    return HealthCheck(name, "ok", said)


def _ggml(device: Device, build: ggml.GgmlBuild | None) -> list[HealthCheck]:
    """What the build itself says it computes on, and where that is not what the system shows."""
    name = "llama.cpp device"
    if build is None:
        return [_seen(name, "", unread="the installed llama.cpp was not asked for its devices")]
    seen = [
        HealthCheck(name, "ok", f"{d.name}: {d.description}, {_memory_of(d)}")
        for d in build.devices
    ]
    return seen + _of_findings(name, ggml.differences(device, build))


def _of_findings(name: str, findings: Iterable[Finding]) -> list[HealthCheck]:
    """Those that want something done."""
    return [HealthCheck(name, f.level, f.message, f.fix) for f in findings if f.level != "info"]


def _memory_of(device: ggml.GgmlDevice) -> str:
    if device.accelerator == "cpu":  # ggml says that all of it is free
        return f"{device.memory_total_bytes / GB:.1f} GB"
    return f"{device.memory_free_bytes / GB:.1f} of {device.memory_total_bytes / GB:.1f} GB free"


def _cuda_code(device: Device, build: BuildFacts, said: str) -> HealthCheck:
    """Native code runs within one major version, up to the GPU's minor; anything else needs PTX or
    fails."""
    architectures = build.cuda_architectures
    capability = re.fullmatch(r"([0-9]+)\.([0-9])", device.compute_capability)
    if capability:
        major, minor = (int(capability[1]), int(capability[2]))
    else:
        major, minor = (0, 0)
    listed = ", ".join(f"sm_{architecture}" for architecture in architectures)
    runs = any(a // 10 == major and a % 10 <= minor for a in architectures)
    slow = f"this GPU is sm_{major}{minor}: it would be slow to start or fail"
    checks: tuple[tuple[bool, Status, str, str], ...] = (
        (capability is None, "not checked", ": this GPU's compute capability is unknown", ""),
        (not architectures, "not checked", ": no architecture names found in its CUDA code", ""),
        (runs, "ok", f" ({listed})", ""),
        (True, "error", f" for {listed}, but {slow}", _SETUP),
    )
    return next(
        HealthCheck("llama.cpp build", status, said + what, fix)
        for is_so, status, what, fix in checks
        if is_so
    )


def _gpu_share(device: Device) -> list[HealthCheck]:
    """How much of the RAM the system lets the GPU use, where a setting decides it."""
    memory = device.memory
    said = f"the GPU may use {memory.limit_bytes / GB:.1f} of {memory.total_bytes / GB:.1f} GB"
    if device.accelerator == "metal":
        raised = (memory.total_bytes - max(8 * GIB, memory.total_bytes // 16)) // (1 << 20)
        if raised * (1 << 20) > memory.limit_bytes and memory.total_bytes >= 32 * GIB:
            said += f" (until the next restart more: sudo sysctl iogpu.wired_limit_mb={raised})"
        is_assumed = memory.basis == "assumed"
        if is_assumed:
            unread = f"{said}, assumed: Metal could not be asked"
        else:
            unread = ""
        return [_seen("wired limit", said, unread=unread)]
    is_shared = device.kind == "unified" and device.accelerator in ("rocm", "vulkan")
    # A small limit is said among the findings, with its fix.
    is_said = any("GTT" in finding.message for finding in device.findings)
    if is_shared and device.os.startswith("Linux") and not is_said:
        return [HealthCheck("GTT limit", "ok", said)]
    return []


def _seen(
    name: str, message: str, warning: str = "", fix: str = "", *, unread: str = ""
) -> HealthCheck:
    """What was looked at; a `warning` where there is one to give, or why nothing could be read."""
    if unread:
        return HealthCheck(name, "not checked", unread)
    if warning:
        return HealthCheck(name, "warning", warning, fix)
    return HealthCheck(name, "ok", message)


def _memory(device: Device) -> HealthCheck:
    now = device.memory.available_bytes
    limit = device.memory.limit_bytes
    said = f"{now / GB:.1f} of {limit / GB:.1f} GB are free for a model now"
    if now < limit / 2:
        taken = f"{said}: other programs hold the rest"
    else:
        taken = ""
    return _seen("memory", said, taken, "close what you don't need")


def _swap(facts: HealthFacts) -> HealthCheck:
    total, used = facts.swap or (0, 0)
    said = f"{used / GB:.1f} of {total / GB:.1f} GB of swap are in use"
    if used > total / 2:
        slow = f"{said}: a model that gets swapped is tens of times slower"
    else:
        slow = ""
    if not total:
        said = "no swap: what does not fit fails instead of slowing everything down"
    unread = "" if facts.swap else "swap could not be read"
    return _seen("swap", said, slow, "close programs", unread=unread)


def _pressure(facts: HealthFacts) -> HealthCheck:
    found = re.search(r"some avg10=([0-9]+\.[0-9]+)", facts.pressure or "")
    stalled = found[1] if found else "0"
    said = f"programs waited for memory {stalled} % of the last 10 s"
    if found:
        unread = ""
    else:
        unread = "this system does not report stalls (/proc/pressure/memory)"
    return _seen(
        "memory pressure",
        said,
        said if float(stalled) > 5 else "",
        "close programs, or choose a smaller model",
        unread=unread,
    )


def _power(device: Device, facts: HealthFacts) -> HealthCheck:
    if facts.on_battery:
        return _seen("power", "", "on battery: speeds will be below the plan", "plug in")
    if device.os == "macOS":
        # macOS 26 calls it powermode: 0 automatic, 1 low, 2 high.
        low = re.search(r"\b(lowpowermode|powermode)\s+1\b", facts.pmset or "")
        slow = "Low Power Mode is on for a power source" if low else ""
        unread = "pmset gave no answer" if facts.pmset is None else ""
        fix = f"sudo pmset -a {low[1]} 0" if low else ""
        return _seen("power", "Low Power Mode is off", slow, fix, unread=unread)
    profile = (facts.platform_profile or "").strip()
    said = f"the power profile is {profile}"
    slow = said if profile in ("low-power", "quiet", "cool") else ""
    if profile:
        unread = ""
    else:
        unread = "this system has no power profile to read"
    return _seen("power", said, slow, "powerprofilesctl set performance", unread=unread)


def _disk(facts: HealthFacts) -> HealthCheck:
    if not facts.disk_free_bytes:
        return _seen("disk", "", unread="free disk space could not be read")
    name, free = min(facts.disk_free_bytes.items(), key=lambda item: item[1])
    said = f"{free / GB:.0f} GB free for {name}"
    if free < _LITTLE_DISK_BYTES:
        little = f"{said}: a download may not fit"
    else:
        little = ""
    return _seen("disk", said, little, "localllm models du")


def _files(facts: HealthFacts) -> HealthCheck:
    if facts.open_files is None:
        return _seen("file limit", "", unread="this system has no such limit to read")
    is_unlimited = not 0 <= facts.open_files < 1 << 62
    said = f"{'unlimited' if is_unlimited else facts.open_files} open files are allowed"
    is_few = not is_unlimited and facts.open_files < _FEW_FILES
    return _seen("file limit", said, f"only {said}" if is_few else "", "ulimit -n 4096")
