"""Read the tools of this machine for builds: compilers, driver libraries, the installed build.

They are read once and never guessed.
"""

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
# Cores for compilation, if a device's row does not list them.
_CORES_BY_FAMILY = {"GB10": 20}


@dataclass(frozen=True, slots=True)
class BuildHost:
    """The tools and libraries of a machine that affect its builds. None means absent or unknown.

    - `version`: version of the installed llama-cpp-python. Every other build must have it too.
    - `own_backends`: accelerators that the installed build can drive.
    - `nvcc`: version of the CUDA compiler.
    - `cuda_libraries`: folder of the compiler's libraries ("" = not found with it).
    - `cuda_driver`: newest CUDA version that the driver supports.
    - `gcc`: the C++ compiler's major version, if it is GCC.
    - `glibc`: version of the C library.
    - `rocm`: version of AMD's runtime.
    """

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
    """Read this machine.

    `own_backends` are the accelerators that the build installed with localllm can drive ("cpu"
    without any).
    """
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
    """Return the number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _nvcc_path() -> str:
    """Return the CUDA compiler from the path or from packages' usual folders, or ""."""
    path_found = shutil.which("nvcc")
    if path_found:
        return path_found
    for path in ("/usr/local/cuda/bin/nvcc", "/opt/cuda/bin/nvcc"):
        if os.path.exists(path):
            return path
    return ""


def assumed(device: Device) -> BuildHost:
    """Return an ordinary machine with this device, to show the setup of another machine.

    It has no CUDA compiler, up-to-date drivers, and the build that `make chat` makes (Metal on a
    Mac, the CPU elsewhere).
    """
    version = installed_version() or "0.3.36"
    n_cores = device.n_cpu_cores or _CORES_BY_FAMILY.get(device.family, 8)
    if device.accelerator == "metal" or device.os == "macOS":
        return BuildHost("macos", "arm64", version, n_cores, own_backends=("metal",))
    architecture = "x86_64"
    if device.family in ("GB10", "N1X", "Jetson"):
        architecture = "aarch64"
    system = "windows" if device.os == "Windows" else "linux"
    return BuildHost(system, architecture, version, n_cores)


def installed_version() -> str:
    """Return the version of llama-cpp-python installed with localllm, or "" without one."""
    try:
        return importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        return ""


def version_of(text: str) -> Version | None:
    """Return the first two numbers of a version such as "13.0.88"."""
    match = re.search(r"(\d+)\.(\d+)", text)
    if match is None:
        return None
    return int(match[1]), int(match[2])


def _cuda_libraries(nvcc_path: str, version: Version) -> str:
    """Return the folder of that compiler's CUDA libraries on Linux.

    Returns "" if the libraries are not in its tree (the compiler may be a script).
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(nvcc_path)))
    file_names = [f"{name}.so.{version[0]}" for name in ("libcudart", "libcublas")]
    for folder in (
        f"{root}/lib64",
        f"{root}/targets/{platform.machine()}-linux/lib",
        f"{root}/lib",
    ):
        if all(os.path.exists(f"{folder}/{name}") for name in file_names):
            return folder
    return ""


def _gcc() -> int | None:
    """Return the major version of the g++ that nvcc uses, or None.

    Two environment variables can choose it (Arch sets one). On a Mac g++ is clang, so the result is
    None.
    """
    if not sys.platform.startswith("linux"):
        return None
    compiler = os.environ.get("CUDAHOSTCXX") or os.environ.get("NVCC_CCBIN") or "g++"
    path = shutil.which(compiler)
    if path is None:
        return None
    major, _, _ = run(path, "-dumpversion").partition(".")
    if not major.strip().isdigit():
        return None
    return int(major)


def _rocm() -> Version | None:
    """Return the version of AMD's runtime.

    It comes from its packages, or from the major version in its library's name.
    """
    version_read = version_of(read_text("/opt/rocm/.info/version") or "")
    if version_read:
        return version_read
    name = ctypes.util.find_library("amdhip64") or ""
    _, _, version = name.rpartition(".so.")
    major, _, _ = version.partition(".")
    if not major.isdigit():
        return None
    return int(major), 0


def _cuda_driver() -> Version | None:
    """Return the newest CUDA version that the NVIDIA driver supports, read by NVML, or None."""
    number = 0
    with nvidia.session() as api:
        if api is not None:
            number = int(api.nvmlSystemGetCudaDriverVersion_v2())
    if not number:
        return None
    return number // 1000, number % 1000 // 10
