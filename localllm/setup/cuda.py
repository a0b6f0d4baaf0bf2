"""Choose the ready-made CUDA wheel for all cards of a machine, or the steps to compile one.

These functions do no I/O. The wheels contain this code (November 2026; llama-cpp-python's
build-wheels-cuda.yaml):

- CUDA 13: 7.5 to 9.0, with PTX of 9.0.
- CUDA 12: 6.0 to 9.0, with PTX of 9.0.
- CUDA 11.8: 6.0 to 8.9, without PTX.

From PTX, the driver compiles code for any newer GPU at the first start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localllm.device.types import Device
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version, version_of
from localllm.setup.steps import (
    TOOLKIT,
    BuildRecipe,
    Step,
    chain,
    compile_time_text,
    compiler,
    from_source,
    is_x86,
    wheel,
)

_CUDA_13 = f"{TOOLKIT}/nvidia/cu13"
_NATIVE_CODE: tuple[Version, ...] = ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0))
# The packages contain a complete compiler for Linux from CUDA 13 on (CUDA 12's contain only ptxas).
# Before 13.4, it rejects GCC 16. Before 13.2, it rejects C library 2.42 (crt/host_config.h and
# crt/math_functions.h; tests/setup/recorded/cuda_headers.txt).
PACKAGED = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl,cublas]>=13.4,<14"
_NEWEST_GCC: tuple[tuple[Version, int], ...] = (
    ((13, 4), 16),
    ((13, 0), 15),
    ((12, 8), 14),
    ((12, 4), 13),
    ((12, 0), 12),
)
_GLIBC_2_42_FROM: Version = (13, 2)
_OLDEST_PACKAGED_CODE: Version = (7, 5)


@dataclass(frozen=True, slots=True)
class CudaWheel:
    """One kind of wheel in the index.

    - `cuda`: the CUDA version that the driver must support.
    - `oldest`, `newest`: range of compute capabilities it has code for.
    - `ptx`: whether it has PTX of `newest`.
    - `systems`: the systems it is made for.
    """

    cuda: Version
    oldest: Version
    newest: Version = (9, 0)
    ptx: bool = True
    systems: tuple[str, ...] = ("linux", "windows")

    @property
    def index(self) -> str:
        return f"cu{self.cuda[0]}{self.cuda[1]}"

    def has_code_of(self, capability: Version) -> bool:
        """Return True if the wheel has native code for this GPU.

        Code for a GPU runs on later ones of the same major version.
        """
        codes = [code for code in _NATIVE_CODE if self.oldest <= code <= self.newest]
        return any(code[0] == capability[0] and code[1] <= capability[1] for code in codes)

    def runs_on(self, capability: Version) -> bool:
        return self.has_code_of(capability) or (self.ptx and capability > self.newest)


_CUDA_12 = tuple(CudaWheel((12, minor), (6, 0)) for minor in (5, 4))
_CUDA_12_LINUX = tuple(CudaWheel((12, n), (6, 0), systems=("linux",)) for n in (3, 2, 1))
_CUDA_11 = CudaWheel((11, 8), (6, 0), newest=(8, 9), ptx=False)
WHEELS = (CudaWheel((13, 0), (7, 5)), *_CUDA_12, *_CUDA_12_LINUX, _CUDA_11)


def capabilities(device: Device) -> tuple[Version, ...]:
    """Return the compute capabilities of all cards without duplicates, the oldest first.

    Unknown ones are left out.
    """
    versions = {version_of(card.compute_capability) for card in device.cards or (device,)}
    return tuple(sorted(version for version in versions if version is not None))


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def needs_own_code(device: Device) -> bool:
    """Return True for NVIDIA's newest GPUs.

    An installed CUDA build may have been made for older GPUs.
    """
    return device.accelerator == "cuda" and any(c > WHEELS[0].newest for c in capabilities(device))


def recipe(device: Device, host: BuildHost) -> BuildRecipe:
    """Return the recipe for a build that runs on all cards of `device`.

    The order of preference is a wheel with code for each card, a build compiled for them, and a
    wheel with PTX that the driver compiles. Raises SetupError if all are impossible.
    """
    if device.accelerator != "cuda" and host.cuda_driver is None:
        raise SetupError(
            f"{device.name} has no NVIDIA GPU for a CUDA build",
            hint="`localllm device` shows the hardware found, `localllm setup --dry-run` the "
            "build to be made",
        )
    cards = capabilities(device)
    wheels = _wheels_for(host)
    native_wheel = next(
        (candidate for candidate in wheels if all(candidate.has_code_of(card) for card in cards)),
        None,
    )
    recipes = _compiled_recipes(device, host, cards, native_wheel)
    if native_wheel is not None:
        return chain(_wheel_recipe(host, native_wheel, cards), *recipes)
    ptx_wheel = next(
        (candidate for candidate in wheels if all(candidate.runs_on(card) for card in cards)), None
    )
    if ptx_wheel is not None:
        recipes.append(_wheel_recipe(host, ptx_wheel, cards))
    if not recipes:
        raise _no_build_error(device, host, cards)
    return chain(*recipes)


def _no_build_error(device: Device, host: BuildHost, cards: Sequence[Version]) -> SetupError:
    """Return the error that explains why there is no CUDA build, and a fix."""
    if not cards:
        message = f"the compute capability of {device.name} is unknown"
        return SetupError(message, hint="update the NVIDIA driver")
    cards_text = " and ".join(dotted(card) for card in cards)
    message = f"no CUDA wheel or compiler here has code for {cards_text}"
    if host.cuda_driver:
        message += f" with a driver for CUDA {dotted(host.cuda_driver)}"
    return SetupError(message, hint="update the NVIDIA driver, or localllm setup --backend vulkan")


# --- wheels ---------------------------------------------------------------------------------------


def _wheels_for(host: BuildHost) -> list[CudaWheel]:
    """Return the wheels for this system and its driver, the newest first."""
    if not is_x86(host):
        return []
    driver = host.cuda_driver or WHEELS[0].cuda
    return [wheel for wheel in WHEELS if host.system in wheel.systems and wheel.cuda <= driver]


def _wheel_recipe(host: BuildHost, cuda_wheel: CudaWheel, cards: Sequence[Version]) -> BuildRecipe:
    codes = [code for code in _NATIVE_CODE if cuda_wheel.oldest <= code <= cuda_wheel.newest]
    because = f"this wheel has code for {_versions_text(codes)}"
    notes: tuple[str, ...] = ()
    if any(not cuda_wheel.has_code_of(card) for card in cards):
        because += ", and PTX, which the driver compiles for newer GPUs"
        delay = "the first start takes minutes, while the driver compiles"
        notes = (f"{delay}; a build with native code is faster if it is possible",)
    elif len(cards) == 1:
        because += f": {dotted(cards[0])} is covered"
    elif cards:
        because += f": {_versions_text(cards)} are covered"
    if host.cuda_driver and host.cuda_driver < WHEELS[0].cuda:
        because += f"; this driver supports CUDA {dotted(host.cuda_driver)}"
    steps, libraries = _cuda_library_steps(host, cuda_wheel)
    return BuildRecipe(
        name="cuda" if cuda_wheel is WHEELS[0] else f"cuda-{dotted(cuda_wheel.cuda)}",
        backend="cuda",
        title=f"llama.cpp for CUDA {dotted(cuda_wheel.cuda)}, llama-cpp-python's own wheel",
        because=because,
        steps=(*steps, wheel(host, cuda_wheel.index)),
        library_dirs=libraries,
        effort="a download",
        notes=notes,
    )


def _cuda_library_steps(
    host: BuildHost, cuda_wheel: CudaWheel
) -> tuple[tuple[Step, ...], tuple[str, ...]]:
    """Return the steps that install CUDA's own libraries, and the folders with the libraries.

    The wheels do not include them. They come from the system if its toolkit has the same major
    version and is not older. Otherwise they come from packages.
    """
    if host.cuda_libraries and host.nvcc:
        is_same_major = host.nvcc[0] == cuda_wheel.cuda[0]
        if is_same_major and host.nvcc >= cuda_wheel.cuda:
            return (), (host.cuda_libraries,)
    version = dotted(cuda_wheel.cuda)
    step = Step(
        f"the CUDA {version} libraries",
        ("install", "--target", TOOLKIT, f"cuda-toolkit[cudart,cublas]=={version}.*"),
    )
    windows = host.system == "windows"
    if cuda_wheel.cuda[0] >= 13:
        folder = "bin/x86_64" if windows else "lib"
        return (step,), (f"{_CUDA_13}/{folder}",)
    folder = "bin" if windows else "lib"
    packages = f"{TOOLKIT}/nvidia"
    return (step,), (f"{packages}/cuda_runtime/{folder}", f"{packages}/cublas/{folder}")


def _versions_text(versions: Sequence[Version]) -> str:
    *earlier, last = (dotted(version) for version in versions)
    if earlier:
        return f"{', '.join(earlier)} and {last}"
    return last


# --- compiled -------------------------------------------------------------------------------------


def _compiled_recipes(
    device: Device, host: BuildHost, cards: Sequence[Version], native_wheel: CudaWheel | None
) -> list[BuildRecipe]:
    """Return recipes that compile native code for every card.

    The system's compiler is preferred if it is suitable, then the one from packages.
    """
    if not cards:
        return []
    because = "code for exactly this machine's GPUs"
    if native_wheel is None:
        because = f"no prebuilt wheel has code for {_versions_text(cards)}"
        if not is_x86(host):
            because = f"there are no CUDA wheels for {host.architecture}"
    recipes = []
    nvcc_fault = _why_nvcc_unfit(host, cards)
    if host.nvcc and not nvcc_fault:
        compiler_text = f"compiled by this system's nvcc {dotted(host.nvcc)}"
        cmake = []
        if host.nvcc_path:
            cmake.append(f"-DCMAKE_CUDA_COMPILER={host.nvcc_path}")
        recipes.append(_compiled_recipe(host, cards, compiler_text, because, cmake=cmake))
    if device.family == "Jetson" and cards[-1] < (11, 0):
        if not recipes:
            needs = ("nvcc of JetPack: sudo apt install nvidia-jetpack",)
            recipes.append(
                _compiled_recipe(host, cards, "compiled by JetPack's nvcc", because, needs=needs)
            )
    elif host.system == "linux" and cards[0] >= _OLDEST_PACKAGED_CODE:
        if nvcc_fault:
            because = f"{because}; {nvcc_fault}"
        recipes.append(_from_packaged_compiler(host, cards, because))
    return recipes


def _from_packaged_compiler(host: BuildHost, cards: Sequence[Version], because: str) -> BuildRecipe:
    steps = (
        Step(
            "the CUDA 13 compiler and libraries (1.1 GB on disk)",
            ("install", "--target", TOOLKIT, PACKAGED),
        ),
        Step("the library names that CMake looks for", links=_CUDA_13),
    )
    cmake = [f"-DCMAKE_CUDA_COMPILER={_CUDA_13}/bin/nvcc", f"-DCUDAToolkit_ROOT={_CUDA_13}"]
    needs: tuple[str, ...] = ()
    if host.cuda_driver and host.cuda_driver < (13, 0):
        supported = f"this one supports CUDA {dotted(host.cuda_driver)}"
        needs = (f"an NVIDIA driver of version 580 or newer ({supported}): update it",)
    compiler_text = "compiled by the CUDA 13 compiler from the package index"
    return _compiled_recipe(
        host, cards, compiler_text, because, steps, cmake, needs, (f"{_CUDA_13}/lib",)
    )


def _compiled_recipe(
    host: BuildHost,
    cards: Sequence[Version],
    compiler_text: str,
    because: str,
    first_steps: tuple[Step, ...] = (),
    cmake: Sequence[str] = (),
    needs: tuple[str, ...] = (),
    libraries: tuple[str, ...] = (),
) -> BuildRecipe:
    """Return a recipe with native code only, without PTX."""
    sm_numbers = [f"{major}{minor}" for major, minor in cards]
    targets = ";".join(_cmake_target(card) for card in cards)
    flags = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={targets}", "-DLLAVA_BUILD=ON", *cmake]
    return BuildRecipe(
        name=f"cuda-{'-'.join(sm_numbers)}",
        backend="cuda",
        title=f"llama.cpp for CUDA, native code of sm_{' and sm_'.join(sm_numbers)}, "
        f"{compiler_text}",
        because=because,
        steps=(*first_steps, from_source(host, flags)),
        needs=(*compiler(host), *needs),
        library_dirs=libraries,
        effort=compile_time_text(host, 42 * len(cards)),
    )


def _cmake_target(card: Version) -> str:
    """Return CMake's name of a compute capability.

    From 9.0 on, "a" adds the instructions that only this GPU has.
    """
    major, minor = card
    if card >= (9, 0):
        return f"{major}{minor}a-real"
    return f"{major}{minor}-real"


def _why_nvcc_unfit(host: BuildHost, cards: Sequence[Version]) -> str:
    """Return the reason why this system's nvcc cannot compile for these cards.

    Returns "" if it can, or if there is no nvcc.
    """
    nvcc = host.nvcc
    if nvcc is None:
        return ""
    name = f"this system's nvcc {dotted(nvcc)}"
    if nvcc < max(map(_first_nvcc, cards)):
        return f"{name} does not support {dotted(cards[-1])}"
    if nvcc >= (13, 0) and cards[0] < _OLDEST_PACKAGED_CODE:
        return f"{name} no longer supports {dotted(cards[0])}"
    if host.glibc and host.glibc >= (2, 42) and nvcc < _GLIBC_2_42_FROM:
        return f"{name} does not compile against this system's C library {dotted(host.glibc)}"
    newest_gcc = next((gcc for version, gcc in _NEWEST_GCC if nvcc >= version), 12)
    if host.gcc and host.gcc > newest_gcc:
        return f"{name} does not support this system's GCC {host.gcc}"
    if host.cuda_driver and host.cuda_driver[0] < nvcc[0]:
        return f"code from {name} does not run on a driver for CUDA {dotted(host.cuda_driver)}"
    return ""


def _first_nvcc(capability: Version) -> Version:
    """Return the first CUDA version whose compiler supports the target that we compile for."""
    if capability > (12, 0) or capability[0] == 11:
        return 13, 0
    if capability >= (10, 0):
        return 12, 8
    return 12, 0
