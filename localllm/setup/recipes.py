"""Choose the builds of llama.cpp that suit a machine, the best first.

The result is a list of steps that can be shown before they run. These functions do no I/O. The
choices are explained in cuda.py for NVIDIA, and at length in docs/accelerators.md.
llama-cpp-python's own Vulkan and ROCm wheels are for x86-64 Linux and Windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.device.accelerators import KINDS
from localllm.device.types import Device
from localllm.setup import cuda
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version
from localllm.setup.steps import (
    MLX,
    BuildRecipe,
    Preferred,
    Step,
    chain,
    compiler,
    from_source,
    is_x86,
    minutes,
    wheel,
)

_SEE = "`localllm device` shows what was found, `localllm setup --dry-run` what would be made"


def recipes_for(
    device: Device, host: BuildHost, wanted: str = "", preferred: Preferred | None = None
) -> list[BuildRecipe]:
    """Return the recipes for `device`.

    The first recipe carries its alternatives for failures. On a Mac, MLX's recipe is added.

    If `wanted` is a backend of BACKENDS, only that one is made, even if it is already installed. ""
    selects the best, which is the installed build if it can drive that backend. Raises SetupError
    if this machine cannot have any such build.
    """
    if wanted == MLX.name:
        return [_mlx(device, host)]
    if wanted:
        return [_RECIPES[wanted](device, host)]
    lacking = _lacking(device, host, preferred)
    backends = _best(device, host, None if lacking else preferred)
    first = backends[0] if backends else "cpu"
    made, refused = _in_turn(device, host, backends, preferred)
    is_installed = first in host.own_backends and not cuda.needs_own_code(device)
    if first == "cpu" or is_installed:
        made.insert(0, _own(device, first))
    if not made:
        raise SetupError("; ".join(refused), hint=_SEE)
    if preferred is not None and lacking:
        # A build that cannot run is not a choice, but the user should know about it.
        note = f"ROCm would be faster ({preferred.because}). {lacking}"
        made[0] = replace(made[0], notes=(*made[0].notes, note))
    best = chain(*made)
    if first == "metal":
        return [best, _mlx(device, host)]
    return [best]


def _in_turn(
    device: Device, host: BuildHost, backends: Sequence[str], preferred: Preferred | None
) -> tuple[list[BuildRecipe], list[str]]:
    """Return the recipes for `backends`, and the reasons why the last backends have no recipe.

    If a backend before the last recipe is impossible, its reason becomes part of the next recipe's
    `because`.
    """
    made: list[BuildRecipe] = []
    refused: list[str] = []
    for backend in backends:
        try:
            found = _RECIPES[backend](device, host)
        except SetupError as e:
            refused.append(e.message)
            continue
        reasons = [*refused, found.because]
        if preferred is not None and preferred.backend == backend:
            reasons.append(preferred.because)
        refused = []
        made.append(replace(found, because="; ".join(reasons), otherwise=()))
        made += found.otherwise
    return made, refused


def of_release(recipe: BuildRecipe, device: Device, host: BuildHost) -> BuildRecipe:
    """Return `recipe` for `host.version`, another release of llama-cpp-python.

    The release is part of its name, so the build does not replace others.
    """
    made = recipe
    if recipe.name == "own":
        made = _RECIPES[recipe.backend](device, host)
    others = tuple(of_release(other, device, host) for other in made.otherwise)
    because = f"llama-cpp-python {host.version} was asked for; {made.because}"
    return replace(made, name=f"{made.name}-{host.version}", because=because, otherwise=others)


def with_rpc(recipe: BuildRecipe, host: BuildHost) -> BuildRecipe:
    """Return `recipe` with llama.cpp's RPC, compiled here because ready-made wheels lack it.

    Raises SetupError if its recipe does not compile and a C++ compiler would not be enough.
    """
    made = _compiled(recipe, host)
    name = recipe.backend if made.name == "own" else made.name
    return replace(
        made,
        name=f"{name}-rpc",
        title=f"llama.cpp for {KINDS[recipe.backend].label} with RPC, compiled here",
        steps=tuple(_plus_rpc(step) for step in made.steps),
        because="layers can lie on other machines",
        otherwise=(),
    )


def _compiled(recipe: BuildRecipe, host: BuildHost) -> BuildRecipe:
    """Return the first of `recipe` and its alternatives on the same backend that is compiled.

    If all are ready-made, return a new recipe that compiles from source.
    """
    for made in (recipe, *recipe.otherwise):
        if made.backend == recipe.backend and _compiles(made):
            return made
    flags = KINDS[recipe.backend].cmake
    if not flags:
        raise SetupError(
            f"RPC with {recipe.backend} would have to be compiled, and its ready-made wheel "
            "is what suits this machine",
            hint="localllm setup --rpc --backend vulkan (or cpu)",
        )
    steps = (from_source(host, [flags, "-DLLAVA_BUILD=OFF"]),)
    return replace(recipe, steps=steps, needs=tuple(compiler(host)), takes=minutes(host, 10))


def _compiles(recipe: BuildRecipe) -> bool:
    return any("CMAKE_ARGS" in dict(step.environment) for step in recipe.steps)


def _plus_rpc(step: Step) -> Step:
    environment = dict(step.environment)
    if "CMAKE_ARGS" not in environment:
        return step
    environment["CMAKE_ARGS"] += " -DGGML_RPC=ON"
    return replace(step, environment=tuple(environment.items()))


def _best(device: Device, host: BuildHost, preferred: Preferred | None) -> list[str]:
    """Return the backends that can drive `device`, in the order to try them.

    The list is empty for the CPU.
    """
    if device.accelerator == "rocm":
        if preferred is not None and preferred.backend == "rocm":
            return ["rocm", "vulkan"]
        if device.compute_capability in _COMPUTE_ALONE:
            return ["rocm", "vulkan"]
        if host.rocm is not None:
            return ["vulkan", "rocm"]
        return ["vulkan"]
    kinds = (device.accelerator, *KINDS[device.accelerator].instead)
    return [kind for kind in kinds if kind in _RECIPES and kind != "cpu"]


def _lacking(device: Device, host: BuildHost, preferred: Preferred | None) -> str:
    """Return the reason why a preferred ROCm build is impossible now, or ""."""
    if preferred is None or preferred.backend != "rocm":
        return ""
    try:
        needs = _rocm(device, host).needs
    except SetupError as e:
        return f"But {e.message}"
    if needs:
        return f"It needs {'; '.join(needs)}; then `localllm setup --backend rocm`"
    return ""


# --- AMD, Intel -----------------------------------------------------------------------------------


def _vulkan(device: Device, host: BuildHost) -> BuildRecipe:
    """Return the recipe for llama.cpp's Vulkan wheel, then one compiled here.

    A device missing from the table is not rejected, because the trial shows whether there is a
    device.
    """
    if host.system == "macos":
        hint = "the Metal build is the one: localllm setup"
        raise SetupError("there is no Vulkan build for a Mac", hint=hint)
    loader = _vulkan_loader(host)
    if not is_x86(host):
        because = f"there are no Vulkan wheels for {host.architecture}"
        here = _compiled_here(host, "vulkan", because, 20)
        needs = (*loader, *here.needs)
        if not host.glslc:
            tools = "sudo apt install glslc libvulkan-dev spirv-headers"
            needs += (f"glslc and Vulkan's headers: {tools}",)
        return replace(here, needs=needs)
    ready = BuildRecipe(
        name="vulkan",
        backend="vulkan",
        title="llama.cpp for Vulkan, llama-cpp-python's own wheel",
        because="it runs on every maker's driver as it is",
        steps=(wheel(host, "vulkan"),),
        needs=loader,
        takes="a download",
    )
    if not host.glslc:
        return ready
    here = _compiled_here(host, "vulkan", "it is made for this system", 20)
    return chain(ready, replace(here, name="vulkan-here", needs=(*loader, *here.needs)))


def _vulkan_loader(host: BuildHost) -> tuple[str, ...]:
    """Return the packages of Vulkan's loader, if it is missing."""
    if host.vulkan_loader:
        return ()
    packages = (
        "sudo apt install libvulkan1 mesa-vulkan-drivers  "
        "(Fedora: vulkan-loader mesa-vulkan-drivers)"
    )
    if host.system == "windows":
        packages = "install the graphics driver of the card's maker"
    return (f"Vulkan's loader and a driver: {packages}",)


# Architectures in the ROCm wheels, by system (llama-cpp-python's build-wheels-rocm.yaml, November
# 2026).
ROCM_CODE = {
    "linux": (
        "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1150",
        "gfx1151", "gfx1200", "gfx1201",
    ),
    "windows": (
        "gfx1030", "gfx1031", "gfx1032", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151",
        "gfx1200", "gfx1201",
    ),
}  # fmt: skip
ROCM_MAJOR = 7
# Instincts have no graphics, and no Vulkan driver that is worth trying first.
_COMPUTE_ALONE = ("gfx908", "gfx90a", "gfx942", "gfx950")


def _rocm(device: Device, host: BuildHost) -> BuildRecipe:
    gfx = device.compute_capability
    if not gfx.startswith("gfx"):
        gfx = ""
    if device.accelerator != "rocm" and not gfx:
        raise SetupError(f"{device.name} has no Radeon that ROCm knows", hint=_SEE)
    code = ROCM_CODE.get(host.system, ())
    if not code or not is_x86(host):
        told = f"there is no ROCm build for {host.system} on {host.architecture}"
        raise SetupError(told, hint="localllm setup --backend vulkan")
    if gfx and gfx not in code:
        told = f"the ROCm wheel has no code of {gfx} ({device.name}), only of {', '.join(code)}"
        raise SetupError(told, hint="localllm setup --backend vulkan")
    because = f"it has code of {gfx}"
    if not gfx:
        because = f"the trial tells if it has code of this GPU (it has {', '.join(code)})"
    if host.system == "windows":
        return BuildRecipe(
            name="rocm",
            backend="rocm",
            title="llama.cpp for ROCm, llama-cpp-python's own wheel, with AMD's libraries in it",
            because=because,
            steps=(wheel(host, "hip-radeon"),),
            takes="a download of a gigabyte",
        )
    notes: tuple[str, ...] = ()
    if gfx == "gfx1151" and (host.rocm or (0, 0)) < (7, 13):
        notes = _ROCM_NOTES
    return BuildRecipe(
        name="rocm",
        backend="rocm",
        title=f"llama.cpp for ROCm {ROCM_MAJOR}, llama-cpp-python's own wheel",
        because=because,
        steps=(wheel(host, "rocm72"),),
        needs=_rocm_needs(host.rocm),
        takes="a download of a gigabyte",
        notes=notes,
    )


_ROCM_NOTES = ("ROCm 7.2 crashes on some boards with Strix Halo, where 7.13 and later run",)


def _rocm_needs(rocm: Version | None) -> tuple[str, ...]:
    packages = f"ROCm {ROCM_MAJOR} of AMD's packages, 7.2 or newer"
    needs = f"{packages}: its libraries are not in the wheel"
    if rocm is None:
        return (needs,)
    if rocm[0] == ROCM_MAJOR:
        return ()
    lacks = "which lacks the libraries it asks for"
    return (f"{needs} (here is {_version_text(rocm)}, {lacks})",)


def _version_text(version: Version) -> str:
    if version[1]:
        return f"ROCm {version[0]}.{version[1]}"
    return f"ROCm {version[0]}"


# --- Macs, processors, MLX ------------------------------------------------------------------------


def _compiled_here(host: BuildHost, backend: str, because: str, cpu_minutes: int) -> BuildRecipe:
    """Return a recipe that needs only a C++ compiler and the backend's flag (no flag for the CPU)."""
    kind = KINDS[backend]
    flags = ["-DLLAVA_BUILD=ON"]
    if backend != "cpu":
        flags.insert(0, kind.cmake)
    return BuildRecipe(
        name=backend,
        backend=backend,
        title=f"llama.cpp for {kind.label}, compiled here",
        because=because,
        steps=(from_source(host, flags),),
        needs=tuple(compiler(host)),
        takes=minutes(host, cpu_minutes),
    )


def _metal(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator != "metal":
        raise SetupError(f"{device.name} is no Mac with Apple's GPU: Metal is not there", hint=_SEE)
    because = "Metal is on wherever llama-cpp-python is compiled on a Mac"
    return _compiled_here(host, "metal", because, 8)


def _cpu(_: Device, host: BuildHost) -> BuildRecipe:
    if host.system == "macos":
        told = (
            "there is no build for a Mac's processor alone: "
            "llama.cpp is never compiled without Metal there"
        )
        raise SetupError(told, hint="run without the GPU: --gpu-layers 0")
    return _compiled_here(host, "cpu", "compiled for exactly this processor's instructions", 8)


def _mlx(device: Device, host: BuildHost) -> BuildRecipe:
    match device.accelerator:
        case "metal":
            because = (
                "Apple's own engine runs MLX models on the same GPU, "
                "many of them faster than llama.cpp"
            )
            return _mlx_for("metal", "MLX for Metal", because)
        case "cuda":
            oldest = min(cuda.capabilities(device), default=(7, 5))
            if host.system != "linux" or oldest < (7, 5):
                raise SetupError(
                    "MLX for CUDA needs Linux and a GPU of compute capability 7.5 or newer",
                    hint="localllm setup",
                )
            because = "MLX has CUDA code of 7.5, 8.0, 9.0a, 10.0a, 12.0a and 12.1a"
            return _mlx_for("cuda", "MLX for CUDA 13", because)
    if host.system == "windows":
        raise SetupError("MLX does not run on Windows", hint="localllm setup makes llama.cpp ready")
    because = "MLX runs here, for what it is worth without a GPU"
    return _mlx_for("cpu", "MLX on the processor", because)


def _mlx_for(accelerator: str, title: str, because: str) -> BuildRecipe:
    step = Step("MLX and its model code", ("install", *MLX.requirements[accelerator]))
    return BuildRecipe(
        name=MLX.name,
        backend=MLX.name,
        title=title,
        because=because,
        steps=(step,),
        takes="a download",
        into_environment=True,
    )


_RECIPES: dict[str, Callable[[Device, BuildHost], BuildRecipe]] = {
    "cuda": cuda.recipe, "vulkan": _vulkan, "rocm": _rocm, "metal": _metal, "cpu": _cpu,
}  # fmt: skip
BACKENDS = (*_RECIPES, MLX.name)


def _own(device: Device, backend: str) -> BuildRecipe:
    """Return the recipe for the installed build."""
    if backend != "cpu":
        label = KINDS[backend].label
        title = f"llama.cpp for {label}, as it is installed"
        because = f"the installed llama.cpp is made for {label} already"
        return BuildRecipe("own", backend, title, because)
    # A finding whose fix is a flag concerns plans, not builds.
    wrong = [f for f in device.findings if f.level != "info" and not f.fix.startswith("--")]
    if wrong:
        return BuildRecipe("own", "cpu", "the processor's build goes on", wrong[0].message)
    because = "the installed llama.cpp is made for the processor already"
    return BuildRecipe("own", "cpu", "nothing to build", because)
