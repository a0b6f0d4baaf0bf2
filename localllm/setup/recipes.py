"""From a machine to the build of llama.cpp that suits it, as steps that can be shown before they are taken: pure.

The facts behind the choices (November 2026; docs/accelerators.md says them at length): llama-cpp-python's own wheels have
CUDA code for 7.5 to 9.0, none for 10 and above; its Vulkan and ROCm wheels are for x86-64 Linux and Windows; the
compiler in the `cuda-toolkit` packages is complete for x86-64 and aarch64 Linux from CUDA 13 on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.device.accelerators import KINDS
from localllm.device.types import Accelerator, Device
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost

# Stands in a step for the folder of the build, which is known when it is made.
FOLDER = "{build}"
_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
_TOOLKIT = f"{FOLDER}/toolkit"
_CUDA_13 = f"{_TOOLKIT}/nvidia/cu13"
# What `pyproject.toml` names in the extras mlx and mlx-cuda: a test holds them together.
MLX = ("mlx>=0.32,<0.40", "mlx-lm>=0.32.1,<0.40")
MLX_CPU = ("mlx[cpu]>=0.32,<0.40", "mlx-lm>=0.32.1,<0.40")
MLX_CUDA = ("mlx[cuda13]>=0.32,<0.40", "mlx-lm>=0.32.1,<0.40")
_SEE = "`localllm device` shows what was found, `localllm setup --dry-run` what would be made"
_NEWEST_IN_WHEELS, _OLDEST_IN_WHEELS = (9, 0), (7, 5)


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done: `pip` arguments with what is added to the environment, or (`links`) the file names that
    CMake looks for in the toolkit's folder. `said` is for people."""

    said: str
    pip: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    links: str = ""

    def command(self) -> str:
        """The step as a line for a shell."""
        if self.links:
            return f"link the CUDA libraries under the names CMake looks for, in {self.links}/lib"
        settings = [f'{name}="{value}"' for name, value in self.environment]
        words = [f"'{word}'" if any(c in word for c in "[]<>*") else word for word in self.pip]
        return " ".join([*settings, "pip", *words])


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """A build for a machine. `name` is its folder's, "own" where the installed one already is right. `backend` is what the
    trial must find at work; `needs` is what is missing here, each with how to get it; `library_dirs` are searched for
    shared libraries when it runs. `into_environment`: its steps change the installation itself (MLX)."""

    name: str
    backend: str
    title: str
    because: str
    steps: tuple[Step, ...] = ()
    needs: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()
    takes: str = ""
    into_environment: bool = False
    notes: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Preferred:
    """Which of several backends a machine runs faster with, and how that is known."""

    backend: Accelerator
    because: str


def recipes_for(
    device: Device, host: BuildHost, wanted: str = "", preferred: Preferred | None = None
) -> list[BuildRecipe]:
    """What to make for `device`: one recipe, on a Mac also MLX's. `wanted`: a backend of BACKENDS, which is made in any case;
    "" = the best, which is the installed build where that one can drive it.

    Raises SetupError where that can't be had on this machine at all.
    """
    if wanted == "mlx":
        return [_mlx(device, host)]
    backend = wanted or _best(device, preferred)
    if not wanted and backend in host.own_backends and not _needs_own_code(device):
        own = _own(backend)
        return [own, _mlx(device, host)] if backend == "metal" else [own]
    if not wanted and backend == "metal":
        return [_metal(device, host), _mlx(device, host)]
    made = _RECIPES[backend](device, host)
    if preferred is not None and not wanted and preferred.backend == backend:
        made = _because(made, f"{made.because}; {preferred.because}")
    return [made]


def with_rpc(recipe: BuildRecipe, host: BuildHost) -> BuildRecipe:
    """`recipe` with llama.cpp's RPC in it, which ready-made wheels lack: it is compiled here. Raises SetupError where
    that takes more than a C++ compiler and its recipe does not compile."""
    from dataclasses import replace

    compiled = tuple(_plus_rpc(step) for step in recipe.steps)
    if compiled == recipe.steps:
        flags = KINDS[recipe.backend].cmake
        if not flags:
            raise SetupError(
                f"RPC with {recipe.backend} would have to be compiled, and its ready-made wheel is what suits this machine",
                hint="localllm setup --rpc --backend vulkan (or cpu)",
            )
        compiled = (_plus_rpc(_from_source(host, [flags, "-DLLAVA_BUILD=OFF"])),)
        recipe = replace(
            recipe, needs=tuple(dict.fromkeys((*recipe.needs, *_compiler(host)))), takes=_minutes(host, 10)
        )
    name = recipe.backend if recipe.name == "own" else recipe.name
    title = f"llama.cpp for {KINDS[recipe.backend].label} with RPC, compiled here"
    return replace(recipe, name=f"{name}-rpc", title=title, steps=compiled, because="layers can lie on other machines")


def _plus_rpc(step: Step) -> Step:
    from dataclasses import replace

    more = tuple((k, f"{v} -DGGML_RPC=ON" if k == "CMAKE_ARGS" else v) for k, v in step.environment)
    return replace(step, environment=more)


def _because(recipe: BuildRecipe, because: str) -> BuildRecipe:
    from dataclasses import replace

    return replace(recipe, because=because)


def _needs_own_code(device: Device) -> bool:
    """True for NVIDIA's newest, where an installed CUDA build may be one that was made for older parts."""
    capability = _capability(device)
    return device.accelerator == "cuda" and capability is not None and capability > _NEWEST_IN_WHEELS


def _best(device: Device, preferred: Preferred | None) -> str:
    if device.accelerator == "rocm":
        return preferred.backend if preferred is not None else "vulkan"
    kinds = (device.accelerator, *KINDS[device.accelerator].instead)
    return next(kind for kind in kinds if kind in _RECIPES)


# --- NVIDIA ---------------------------------------------------------------------------------------------------------


def _cuda(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator != "cuda":
        raise SetupError(f"{device.name} has no NVIDIA GPU that a CUDA build could use", hint=_SEE)
    capability = _capability(device)
    if capability and capability > _NEWEST_IN_WHEELS:
        return _compiled_cuda(device, host, capability, _too_new(capability))
    if host.architecture not in ("x86_64", "AMD64"):
        if not capability:
            raise SetupError(f"the compute capability of {device.name} is unknown", hint="update the NVIDIA driver")
        return _compiled_cuda(device, host, capability, f"there are no CUDA wheels for {host.architecture}")
    if capability and capability < _OLDEST_IN_WHEELS:
        if host.nvcc and host.nvcc < (13, 0):
            return _compiled_cuda(device, host, capability, "CUDA 13 no longer compiles for it, the nvcc here does")
        found = _vulkan(device, host)
        return _because(found, f"CUDA 13 no longer knows compute capability {_dotted(capability)}; {found.because}")
    return _cuda_wheel(host, capability)


def _capability(device: Device) -> tuple[int, int] | None:
    major, _, minor = device.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _too_new(capability: tuple[int, int]) -> str:
    return f"the ready-made CUDA wheels have no code of {_dotted(capability)}, which has instructions of its own"


def _compiled_cuda(device: Device, host: BuildHost, capability: tuple[int, int], because: str) -> BuildRecipe:
    """Native code for one architecture. From 9.0 on "a" adds the instructions that only this very part has."""
    number = f"{capability[0]}{capability[1]}"
    architecture = f"{number}{'a' if capability >= (9, 0) else ''}-real"
    cmake = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={architecture}", "-DLLAVA_BUILD=ON"]
    needed = _oldest_nvcc(capability)
    steps: list[Step] = []
    libraries: tuple[str, ...] = ()
    needs = [*_compiler(host)]
    if host.nvcc and host.nvcc >= needed:
        cmake.append(f"-DCMAKE_CUDA_COMPILER={host.nvcc_path}")
        how = f"compiled by this system's nvcc {_dotted(host.nvcc)}"
    elif device.family == "Jetson" and capability[0] < 11:
        how = "compiled by JetPack's nvcc"
        needs.append("nvcc of JetPack: sudo apt install nvidia-jetpack")
    else:
        how = "compiled by the CUDA 13 compiler from the package index"
        needs += _driver(host)
        steps += [
            Step(
                "the CUDA 13 compiler and libraries (1.1 GB on disk)",
                ("install", "--target", _TOOLKIT, "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl,cublas]==13.0.*"),
            ),
            Step("names that CMake looks for", links=_CUDA_13),
        ]
        cmake += [f"-DCMAKE_CUDA_COMPILER={_CUDA_13}/bin/nvcc", f"-DCUDAToolkit_ROOT={_CUDA_13}"]
        libraries = (f"{_CUDA_13}/lib",)
    steps.append(_from_source(host, cmake))
    return BuildRecipe(
        name=f"cuda-{number}",
        backend="cuda",
        title=f"llama.cpp for CUDA, native code of sm_{number}, {how}",
        because=because,
        steps=tuple(steps),
        needs=tuple(needs),
        library_dirs=libraries,
        takes=_minutes(host, 42),
    )


def _oldest_nvcc(capability: tuple[int, int]) -> tuple[int, int]:
    """The first CUDA whose compiler knows the part as we compile for it."""
    if capability > (12, 0) or capability[0] == 11:
        return 13, 0
    return (12, 8) if capability >= (10, 0) else (12, 0)


def _cuda_wheel(host: BuildHost, capability: tuple[int, int] | None) -> BuildRecipe:
    because = "its CUDA wheels have code of 7.5, 8.0, 8.6, 8.9 and 9.0"
    if capability:
        because += f": {_dotted(capability)} is among them"
    steps = []
    libraries: tuple[str, ...] = ()
    if not (host.nvcc and host.nvcc >= (13, 0)):
        steps.append(
            Step("the CUDA 13 libraries", ("install", "--target", _TOOLKIT, "cuda-toolkit[cudart,cublas]==13.0.*"))
        )
        libraries = (f"{_CUDA_13}/lib",)
    notes = ("a model that does not fit the card is slow: the processor's part of these wheels is built without AVX2",)
    return BuildRecipe(
        name="cuda",
        backend="cuda",
        title="llama.cpp for CUDA, llama-cpp-python's own wheel",
        because=because,
        steps=(*steps, _wheel(host, "cu130")),
        needs=tuple(_driver(host)),
        library_dirs=libraries,
        takes="a download",
        notes=notes,
    )


def _driver(host: BuildHost) -> list[str]:
    if host.cuda_driver is None or host.cuda_driver >= (13, 0):
        return []
    return [f"an NVIDIA driver of version 580 or newer (this one does CUDA {_dotted(host.cuda_driver)}): update it"]


# --- AMD, Intel -----------------------------------------------------------------------------------------------------


def _vulkan(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator in ("cpu", "metal"):
        raise SetupError(
            f"{device.name} has no GPU that a Vulkan build could use",
            hint="localllm device shows what was found; on a Mac the Metal build is the one",
        )
    needs = [] if host.vulkan_loader else [f"Vulkan's loader and a driver: {_vulkan_packages(host)}"]
    if host.architecture in ("x86_64", "AMD64"):
        title, because = (
            "llama.cpp for Vulkan, llama-cpp-python's own wheel",
            "it runs on every maker's driver as it is",
        )
        steps, takes = (_wheel(host, "vulkan"),), "a download"
    else:
        title, because = "llama.cpp for Vulkan, compiled here", f"there are no Vulkan wheels for {host.architecture}"
        steps, takes = (_from_source(host, ["-DGGML_VULKAN=ON", "-DLLAVA_BUILD=ON"]),), _minutes(host, 20)
        needs += _compiler(host)
        if not host.glslc:
            needs.append("glslc and Vulkan's headers: sudo apt install glslc libvulkan-dev spirv-headers")
    return BuildRecipe("vulkan", "vulkan", title, because, steps, tuple(needs), takes=takes)


def _vulkan_packages(host: BuildHost) -> str:
    if host.system == "windows":
        return "install the graphics driver of the card's maker"
    return "sudo apt install libvulkan1 mesa-vulkan-drivers  (Fedora: vulkan-loader mesa-vulkan-drivers)"


def _rocm(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator != "rocm":
        raise SetupError(f"{device.name} has no Radeon that ROCm knows", hint=_SEE)
    if host.architecture != "x86_64" or host.system != "linux":
        raise SetupError(
            f"there is no ROCm build for {host.system} on {host.architecture}", hint="localllm setup --backend vulkan"
        )
    needs = () if host.rocm_runtime else ("ROCm 7.2 of AMD's packages: its libraries are not in the wheel",)
    because = "it is made for ROCm 7.2"
    because += (
        ", with code of gfx1151"
        if device.compute_capability == "gfx1151"
        else "; the trial tells if it has code of this GPU"
    )
    return BuildRecipe(
        "rocm",
        "rocm",
        "llama.cpp for ROCm, llama-cpp-python's own wheel",
        because,
        (_wheel(host, "rocm72"),),
        needs,
        takes="a download",
    )


# --- Macs, processors, MLX ------------------------------------------------------------------------------------------


def _metal(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator != "metal":
        raise SetupError(f"{device.name} is no Mac with Apple's GPU: Metal is not there", hint=_SEE)
    steps = (_from_source(host, ["-DGGML_METAL=ON", "-DLLAVA_BUILD=ON"]),)
    because = "Metal is on wherever llama-cpp-python is compiled on a Mac"
    needs = tuple(_compiler(host))
    return BuildRecipe(
        "metal", "metal", "llama.cpp for Metal, compiled here", because, steps, needs, takes=_minutes(host, 8)
    )


def _cpu(_: Device, host: BuildHost) -> BuildRecipe:
    steps = (_from_source(host, ["-DGGML_METAL=OFF", "-DLLAVA_BUILD=ON"]),)
    because = "compiled for exactly this processor's instructions"
    needs = tuple(_compiler(host))
    return BuildRecipe(
        "cpu", "cpu", "llama.cpp for the processor, compiled here", because, steps, needs, takes=_minutes(host, 8)
    )


def _mlx(device: Device, host: BuildHost) -> BuildRecipe:
    title, wanted = "MLX on the processor", MLX_CPU
    because = "MLX runs here, for what it is worth without a GPU"
    if device.accelerator == "metal":
        title, wanted = "MLX for Metal", MLX
        because = "Apple's own engine runs MLX models on the same GPU, many of them faster than llama.cpp"
    elif device.accelerator == "cuda":
        capability = _capability(device)
        if host.system != "linux" or (capability and capability < (7, 5)):
            raise SetupError(
                "MLX for CUDA needs Linux and a GPU of compute capability 7.5 or newer", hint="localllm setup"
            )
        title, wanted = "MLX for CUDA 13", MLX_CUDA
        because = "MLX has CUDA code of 7.5, 8.0, 9.0a, 10.0a, 12.0a and 12.1a"
    elif host.system == "windows":
        raise SetupError("MLX does not run on Windows", hint="localllm setup makes llama.cpp ready")
    step = Step("MLX and its model code", ("install", *wanted))
    return BuildRecipe("mlx", "mlx", title, because, (step,), takes="a download", into_environment=True)


_RECIPES: dict[str, Callable[[Device, BuildHost], BuildRecipe]] = {
    "cuda": _cuda, "vulkan": _vulkan, "rocm": _rocm, "metal": _metal, "cpu": _cpu,
}  # fmt: skip
BACKENDS = (*_RECIPES, "mlx")


# --- steps ----------------------------------------------------------------------------------------------------------


def _own(backend: str) -> BuildRecipe:
    because = f"the installed llama.cpp is made for {KINDS[backend].label} already"
    return BuildRecipe("own", backend, "nothing to build", because, takes="")


def _wheel(host: BuildHost, index: str) -> Step:
    """A wheel of llama-cpp-python's own index alone: the package index has the same version as a source of the CPU build."""
    return Step(
        f"llama-cpp-python {host.version}, ready-made",
        (
            "install", "--target", f"{FOLDER}/site", "--no-deps", "--only-binary", "llama-cpp-python",
            "--index-url", f"{_WHEELS}/{index}", f"llama-cpp-python=={host.version}",
        ),
    )  # fmt: skip


def _from_source(host: BuildHost, cmake: list[str]) -> Step:
    return Step(
        f"llama-cpp-python {host.version}, compiled",
        (
            "install", "--target", f"{FOLDER}/site", "--no-deps", "--no-cache-dir", "--no-binary", "llama-cpp-python",
            f"llama-cpp-python=={host.version}",
        ),
        (("CMAKE_ARGS", " ".join(cmake)), ("CMAKE_BUILD_PARALLEL_LEVEL", str(max(1, host.n_cores)))),
    )  # fmt: skip


def _compiler(host: BuildHost) -> list[str]:
    if host.cxx:
        return []
    if host.system == "macos":
        return ["a C++ compiler: xcode-select --install"]
    return ["a C++ compiler: sudo apt install build-essential  (Fedora: sudo dnf install gcc-c++)"]


def _minutes(host: BuildHost, cpu_minutes: int) -> str:
    return f"about {max(1, round(cpu_minutes / max(1, host.n_cores)))} min on {host.n_cores} cores"
