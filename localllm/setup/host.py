"""What this machine has to build with: compilers, drivers' libraries, the installed build. Read
once, never guessed."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from dataclasses import dataclass, replace

from localllm.device.probes import nvidia, read_text, run
from localllm.device.types import Device

Version = tuple[int, int]
# Cores that compile, where a device's row does not say.
_USUAL_CORES = {"GB10": 20}


@dataclass(frozen=True, slots=True)
class BuildHost:
    """`version` of the installed llama-cpp-python, which every other build must have too;
    `own_backends` is what that one can drive.
    `nvcc` None = no CUDA compiler, `cuda_libraries` the folder of its libraries ("" = not beside
    it);
    `cuda_driver` is the newest CUDA that the driver runs, `gcc` the C++ compiler's major number
    where it is GCC, `glibc` the C library's version, `rocm` that of AMD's runtime; None = not here,
    or not known."""

    system: str
    architecture: str
    version: str
    n_cores: int
    own_backends: tuple[str, ...] = ("cpu",)
    cxx: bool = True
    nvcc: Version | None = None
    nvcc_path: str = ""
    cuda_libraries: str = ""
    cuda_driver: Version | None = None
    glslc: bool = False
    vulkan_loader: bool = True
    rocm: Version | None = None
    gcc: int | None = None
    glibc: Version | None = None


def read(own_backends: tuple[str, ...]) -> BuildHost:
    """This machine. `own_backends`: what the build installed beside localllm can drive ("cpu" where
    nothing)."""
    compilers = [shutil.which(name) for name in ("c++", "g++", "clang++", "cl")]
    loader = ctypes.util.find_library("vulkan")
    _, glibc = platform.libc_ver()
    host = BuildHost(
        system=_system(),
        architecture=platform.machine(),
        version=installed_version(),
        n_cores=_n_cores(),
        own_backends=own_backends or ("cpu",),
        cxx=any(compilers),
        cuda_driver=_cuda_driver(),
        glslc=shutil.which("glslc") is not None,
        vulkan_loader=loader is not None or sys.platform == "win32",
        rocm=_rocm(),
        gcc=_gcc(),
        glibc=version_of(glibc),
    )
    nvcc_path = _nvcc_path()
    if not nvcc_path:
        return host
    host = replace(host, nvcc_path=nvcc_path)
    nvcc = version_of(run(nvcc_path, "--version").partition("release ")[2])
    if nvcc is None:
        return host
    return replace(host, nvcc=nvcc, cuda_libraries=_cuda_libraries(nvcc_path, nvcc))


def _system() -> str:
    match sys.platform:
        case "darwin":
            return "macos"
        case "win32":
            return "windows"
        case _:
            return "linux"


def _n_cores() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nvcc_path() -> str:
    """The CUDA compiler on the path, or where packages put it; "" without one."""
    found = shutil.which("nvcc")
    if found:
        return found
    for path in ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc"):
        if os.path.exists(path):
            return path
    return ""


def assumed(device: Device) -> BuildHost:
    """An ordinary machine with that device: for showing what would be done on a machine that is not
    this one. No CUDA compiler, every driver up to date, the build that `make chat` makes (Metal on
    a Mac, the processor's elsewhere)."""
    version = installed_version() or "0.3.36"
    n_cores = device.n_cpu_cores or _USUAL_CORES.get(device.family, 8)
    if device.accelerator == "metal" or device.os == "macOS":
        return BuildHost("macos", "arm64", version, n_cores, own_backends=("metal",))
    architecture = "x86_64"
    if device.family in ("GB10", "N1X", "Jetson"):
        architecture = "aarch64"
    system = "windows" if device.os == "Windows" else "linux"
    return BuildHost(system, architecture, version, n_cores)


def installed_version() -> str:
    """Version of llama-cpp-python beside localllm; "" where there is none."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_of(text: str) -> Version | None:
    """The first two numbers of "13.0.88"."""
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        return None
    return int(found[1]), int(found[2])


def _cuda_libraries(nvcc_path: str, version: Version) -> str:
    """Where CUDA's libraries of that compiler lie on Linux; "" where they do not lie beside it (it
    may be a script)."""
    root = os.path.dirname(os.path.dirname(os.path.realpath(nvcc_path)))
    wanted = [f"{name}.so.{version[0]}" for name in ("libcudart", "libcublas")]
    for folder in (
        f"{root}/lib64",
        f"{root}/targets/{platform.machine()}-linux/lib",
        f"{root}/lib",
    ):
        if all(os.path.exists(f"{folder}/{name}") for name in wanted):
            return folder
    return ""


def _gcc() -> int | None:
    """The major number of the g++ that nvcc takes, which these variables choose (Arch sets one);
    None where there is none (on a Mac g++ is clang)."""
    if not sys.platform.startswith("linux"):
        return None
    chosen = os.environ.get("CUDAHOSTCXX") or os.environ.get("NVCC_CCBIN") or "g++"
    path = shutil.which(chosen)
    if path is None:
        return None
    number, _, _ = run(path, "-dumpversion").partition(".")
    if not number.strip().isdigit():
        return None
    return int(number)


def _rocm() -> Version | None:
    """AMD's runtime: what its packages say, else the major number in its library's name."""
    found = version_of(read_text("/opt/rocm/.info/version") or "")
    if found:
        return found
    name = ctypes.util.find_library("amdhip64") or ""
    _, _, version = name.rpartition(".so.")
    number, _, _ = version.partition(".")
    if not number.isdigit():
        return None
    return int(number), 0


def _cuda_driver() -> Version | None:
    """The newest CUDA that the NVIDIA driver runs, by NVML; None without one."""
    number = 0
    with nvidia.session() as api:
        if api is not None:
            number = int(api.nvmlSystemGetCudaDriverVersion_v2())
    if not number:
        return None
    return number // 1000, number % 1000 // 10
