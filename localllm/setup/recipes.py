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
from localllm.setup import cuda, releases
from localllm.setup.builds import SetupError
from localllm.setup.host import BuildHost, Version
from localllm.setup.steps import (
    FOLDER,
    MLX,
    BuildRecipe,
    Preferred,
    Step,
    chain,
    compile_time_text,
    compiler,
    from_source,
    is_x86,
    wheel,
)

_HINT = (
    "`localllm device` shows the hardware found, `localllm setup --dry-run` the build to be made"
)


def recipes_for(
    device: Device, host: BuildHost, requested: str = "", preferred: Preferred | None = None
) -> list[BuildRecipe]:
    """Return the recipes for `device`.

    The first recipe carries its alternatives for failures. On a Mac, MLX's recipe is added.

    If `requested` is a backend of BACKENDS, only that one is made, even if it is already installed.
    "" selects the best, which is the installed build if it can drive that backend. Raises
    SetupError if this machine cannot have any such build.
    """
    if requested == MLX.name:
        return [_mlx(device, host)]
    if requested:
        return [_RECIPES[requested](device, host)]
    why_not = _why_not_preferred(device, host, preferred)
    backends = _backends_to_try(device, host, None if why_not else preferred)
    first = backends[0] if backends else "cpu"
    recipes, rejections = _recipes_in_order(device, host, backends, preferred)
    is_installed = first in host.own_backends and not cuda.needs_own_code(device)
    if first == "cpu" or is_installed:
        recipes.insert(0, _installed_build(device, first))
    if not recipes:
        raise SetupError("; ".join(rejections), hint=_HINT)
    if preferred is not None and why_not:
        # A build that cannot run is not a choice, but the user should know about it.
        note = f"ROCm would be faster ({preferred.because}). {why_not}"
        recipes[0] = replace(recipes[0], notes=(*recipes[0].notes, note))
    best = chain(*recipes)
    if first == "metal":
        return [best, _mlx(device, host)]
    return [best]


def _recipes_in_order(
    device: Device, host: BuildHost, backends: Sequence[str], preferred: Preferred | None
) -> tuple[list[BuildRecipe], list[str]]:
    """Return the recipes for `backends`, and the reasons why the last backends have no recipe.

    If a backend before the last recipe is impossible, its reason becomes part of the next recipe's
    `because`.
    """
    recipes: list[BuildRecipe] = []
    rejections: list[str] = []
    for backend in backends:
        try:
            recipe = _RECIPES[backend](device, host)
        except SetupError as e:
            rejections.append(e.message)
            continue
        reasons = [*rejections, recipe.because]
        if preferred is not None and preferred.backend == backend:
            reasons.append(preferred.because)
        rejections = []
        recipes.append(replace(recipe, because="; ".join(reasons), alternatives=()))
        recipes += recipe.alternatives
    return recipes, rejections


def with_archives(recipe: BuildRecipe, device: Device, host: BuildHost) -> BuildRecipe:
    """Return `recipe` and its alternatives, with llama.cpp's own archive before each compilation.

    If no archive can run on this machine, the compilation gives the reason. The CPU's build is
    compiled, since that is for exactly this processor.
    """
    candidates: list[BuildRecipe] = []
    archives: set[str] = set()
    for candidate in (replace(recipe, alternatives=()), *recipe.alternatives):
        backend = candidate.backend
        if _compiles(candidate) and backend != "cpu" and backend not in archives:
            archives.add(backend)
            reason = releases.unfit(backend, device, host)
            if reason:
                candidate = replace(candidate, because=f"{candidate.because}; {reason}")
            else:
                candidates.append(_archive_recipe(backend, host))
        candidates.append(candidate)
    return chain(*candidates)


def _archive_recipe(backend: str, host: BuildHost) -> BuildRecipe:
    archive = _release_recipe("latest", backend, "it takes a download instead of a compilation")
    if backend == "vulkan":
        return replace(archive, needs=_vulkan_loader(host))
    return archive


def of_release(recipe: BuildRecipe, device: Device, host: BuildHost) -> BuildRecipe:
    """Return `recipe` for `host.version`, another release of llama-cpp-python.

    The release is part of its name, so the build does not replace others.
    """
    recipe_here = recipe
    if recipe.name == "own":
        recipe_here = _RECIPES[recipe.backend](device, host)
    others = tuple(of_release(other, device, host) for other in recipe_here.alternatives)
    because = f"llama-cpp-python {host.version} was requested; {recipe_here.because}"
    return replace(
        recipe_here, name=f"{recipe_here.name}-{host.version}", because=because, alternatives=others
    )


def of_llama_cpp(tag: str, device: Device, host: BuildHost, requested: str = "") -> BuildRecipe:
    """Return the recipe for a release of llama.cpp itself, as its makers compiled it.

    `requested` is the backend, or "" for the best that this machine can drive. Its alternatives are
    the same release for other backends.
    """
    backends = [requested] if requested else (_backends_to_try(device, host, None) or ["cpu"])
    because = f"llama.cpp's release {tag} was asked for"
    return chain(*(_release_recipe(tag, backend, because) for backend in backends))


def _release_recipe(tag: str, backend: str, because: str) -> BuildRecipe:
    label = KINDS[backend].label
    return BuildRecipe(
        name=f"{tag}-{backend}",
        backend=backend,
        title=f"llama.cpp {tag} for {label}, its makers' own archive",
        because=because,
        steps=(Step(f"llama.cpp {tag}", release=tag),),
        libraries=f"{FOLDER}/lib",
        effort="a download",
    )


def of_folder(name: str, source: str, folder: str, backend: str) -> BuildRecipe:
    """Return the recipe for a llama.cpp that another program installed. It is not moved."""
    return BuildRecipe(
        name=name,
        backend=backend,
        title=f"the llama.cpp of {source}",
        because=f"it is installed in {folder}",
        libraries=folder,
    )


def with_rpc(recipe: BuildRecipe, host: BuildHost) -> BuildRecipe:
    """Return `recipe` with llama.cpp's RPC, compiled here because ready-made wheels lack it.

    Raises SetupError if its recipe does not compile and a C++ compiler would not be enough.
    """
    compiled = _compiled_recipe(recipe, host)
    name = recipe.backend if compiled.name == "own" else compiled.name
    return replace(
        compiled,
        name=f"{name}-rpc",
        title=f"llama.cpp for {KINDS[recipe.backend].label} with RPC, compiled here",
        steps=tuple(_with_rpc_flag(step) for step in compiled.steps),
        because="layers can run on other machines",
        alternatives=(),
    )


def _compiled_recipe(recipe: BuildRecipe, host: BuildHost) -> BuildRecipe:
    """Return the first of `recipe` and its alternatives on the same backend that is compiled.

    If all are ready-made, return a new recipe that compiles from source.
    """
    for candidate in (recipe, *recipe.alternatives):
        if candidate.backend == recipe.backend and _compiles(candidate):
            return candidate
    flags = KINDS[recipe.backend].cmake
    if not flags:
        raise SetupError(
            f"RPC with {recipe.backend} needs a compiled build, but only the prebuilt wheel "
            "suits this machine",
            hint="localllm setup --rpc --backend vulkan (or cpu)",
        )
    steps = (from_source(host, [flags, "-DLLAVA_BUILD=OFF"]),)
    return replace(
        recipe, steps=steps, needs=tuple(compiler(host)), effort=compile_time_text(host, 10)
    )


def _compiles(recipe: BuildRecipe) -> bool:
    return any("CMAKE_ARGS" in dict(step.environment) for step in recipe.steps)


def _with_rpc_flag(step: Step) -> Step:
    environment = dict(step.environment)
    if "CMAKE_ARGS" not in environment:
        return step
    environment["CMAKE_ARGS"] += " -DGGML_RPC=ON"
    return replace(step, environment=tuple(environment.items()))


def _backends_to_try(device: Device, host: BuildHost, preferred: Preferred | None) -> list[str]:
    """Return the backends that can drive `device`, in the order to try them.

    The list is empty for the CPU.
    """
    if device.accelerator == "rocm":
        if preferred is not None and preferred.backend == "rocm":
            return ["rocm", "vulkan"]
        if device.compute_capability in _ROCM_ONLY:
            return ["rocm", "vulkan"]
        if host.rocm is not None:
            return ["vulkan", "rocm"]
        return ["vulkan"]
    kinds = (device.accelerator, *KINDS[device.accelerator].instead)
    return [kind for kind in kinds if kind in _RECIPES and kind != "cpu"]


def _why_not_preferred(device: Device, host: BuildHost, preferred: Preferred | None) -> str:
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
        hint = "use the Metal build: localllm setup"
        raise SetupError("there is no Vulkan build for a Mac", hint=hint)
    loader = _vulkan_loader(host)
    if not is_x86(host):
        because = f"there are no Vulkan wheels for {host.architecture}"
        compiled = _compiled_here(host, "vulkan", because, 20)
        needs = (*loader, *compiled.needs)
        if not host.glslc:
            tools = "sudo apt install glslc libvulkan-dev spirv-headers"
            needs += (f"glslc and Vulkan's headers: {tools}",)
        return replace(compiled, needs=needs)
    ready = BuildRecipe(
        name="vulkan",
        backend="vulkan",
        title="llama.cpp for Vulkan, llama-cpp-python's own wheel",
        because="it runs on every vendor's driver without compiling",
        steps=(wheel(host, "vulkan"),),
        needs=loader,
        effort="a download",
    )
    if not host.glslc:
        return ready
    compiled = _compiled_here(host, "vulkan", "it is compiled for this system", 20)
    return chain(ready, replace(compiled, name="vulkan-here", needs=(*loader, *compiled.needs)))


def _vulkan_loader(host: BuildHost) -> tuple[str, ...]:
    """Return the packages of Vulkan's loader, if it is missing."""
    if host.vulkan_loader:
        return ()
    packages = (
        "sudo apt install libvulkan1 mesa-vulkan-drivers  "
        "(Fedora: vulkan-loader mesa-vulkan-drivers)"
    )
    if host.system == "windows":
        packages = "install the graphics driver of the card's vendor"
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
_ROCM_ONLY = ("gfx908", "gfx90a", "gfx942", "gfx950")


def _rocm(device: Device, host: BuildHost) -> BuildRecipe:
    gfx = device.compute_capability
    if not gfx.startswith("gfx"):
        gfx = ""
    if device.accelerator != "rocm" and not gfx:
        raise SetupError(f"{device.name} has no Radeon that ROCm supports", hint=_HINT)
    code = ROCM_CODE.get(host.system, ())
    if not code or not is_x86(host):
        message = f"there is no ROCm build for {host.system} on {host.architecture}"
        raise SetupError(message, hint="localllm setup --backend vulkan")
    if gfx and gfx not in code:
        message = (
            f"the ROCm wheel has no code for {gfx} ({device.name}), only for {', '.join(code)}"
        )
        raise SetupError(message, hint="localllm setup --backend vulkan")
    because = f"it has code for {gfx}"
    if not gfx:
        because = f"the test shows whether it has code for this GPU (it has {', '.join(code)})"
    if host.system == "windows":
        return BuildRecipe(
            name="rocm",
            backend="rocm",
            title="llama.cpp for ROCm, llama-cpp-python's own wheel, including AMD's libraries",
            because=because,
            steps=(wheel(host, "hip-radeon"),),
            effort="the download is about 1 GB",
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
        effort="the download is about 1 GB",
        notes=notes,
    )


_ROCM_NOTES = ("ROCm 7.2 crashes on some Strix Halo boards; 7.13 and later work",)


def _rocm_needs(rocm: Version | None) -> tuple[str, ...]:
    required = f"ROCm {ROCM_MAJOR} from AMD's packages, 7.2 or newer"
    missing = f"{required}: the wheel does not include its libraries"
    if rocm is None:
        return (missing,)
    if rocm[0] == ROCM_MAJOR:
        return ()
    reason = "which lacks the required libraries"
    return (f"{missing} (installed: {_version_text(rocm)}, {reason})",)


def _version_text(version: Version) -> str:
    if version[1]:
        return f"ROCm {version[0]}.{version[1]}"
    return f"ROCm {version[0]}"


# --- Macs, processors, MLX ------------------------------------------------------------------------


def _compiled_here(host: BuildHost, backend: str, because: str, cpu_minutes: int) -> BuildRecipe:
    """Return a recipe that needs only a C++ compiler and the backend's flag (no flag for the
    CPU)."""
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
        effort=compile_time_text(host, cpu_minutes),
    )


def _metal(device: Device, host: BuildHost) -> BuildRecipe:
    if device.accelerator != "metal":
        raise SetupError(
            f"{device.name} is not a Mac with an Apple GPU, so it has no Metal", hint=_HINT
        )
    because = "llama-cpp-python compiled on a Mac always includes Metal"
    return _compiled_here(host, "metal", because, 8)


def _cpu(_: Device, host: BuildHost) -> BuildRecipe:
    if host.system == "macos":
        message = "there is no CPU build for a Mac: llama.cpp is always compiled with Metal there"
        raise SetupError(message, hint="run without the GPU: --gpu-layers 0")
    return _compiled_here(host, "cpu", "compiled for this CPU's exact instruction set", 8)


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
        raise SetupError("MLX does not run on Windows", hint="use llama.cpp: localllm setup")
    because = "MLX runs here, but without a GPU"
    return _mlx_for("cpu", "MLX on the CPU", because)


def _mlx_for(accelerator: str, title: str, because: str) -> BuildRecipe:
    step = Step("MLX and its model code", ("install", *MLX.requirements[accelerator]))
    return BuildRecipe(
        name=MLX.name,
        backend=MLX.name,
        title=title,
        because=because,
        steps=(step,),
        effort="a download",
        into_environment=True,
    )


_RECIPES: dict[str, Callable[[Device, BuildHost], BuildRecipe]] = {
    "cuda": cuda.recipe, "vulkan": _vulkan, "rocm": _rocm, "metal": _metal, "cpu": _cpu,
}  # fmt: skip
BACKENDS = (*_RECIPES, MLX.name)


def _installed_build(device: Device, backend: str) -> BuildRecipe:
    """Return the recipe for the installed build."""
    if backend != "cpu":
        label = KINDS[backend].label
        title = f"llama.cpp for {label} (the installed build)"
        because = f"the installed llama.cpp is already built for {label}"
        return BuildRecipe("own", backend, title, because)
    # A finding whose fix is a flag concerns plans, not builds.
    warnings = [
        finding
        for finding in device.findings
        if finding.level != "info" and not finding.fix.startswith("--")
    ]
    if warnings:
        return BuildRecipe("own", "cpu", "the CPU build stays in use", warnings[0].message)
    because = "the installed llama.cpp is already a CPU build"
    return BuildRecipe("own", "cpu", "no build needed", because)
