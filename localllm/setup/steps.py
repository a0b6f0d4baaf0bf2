"""Recipes of builds, their steps, and steps shared by several recipes.

They do no I/O, so a recipe can be shown before it runs.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.device.types import Accelerator
from localllm.setup.host import BuildHost

# Placeholder for the build's folder, which is known only when the build is made.
FOLDER = "{build}"
TOOLKIT = f"{FOLDER}/toolkit"
_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a recipe.

    It runs `pip` with these arguments and additions to the environment. Or it creates the file
    names that CMake looks for in the folder `links`. Or it unpacks llama.cpp's `release` (a tag, or
    "latest") for the recipe's accelerator. `text` is shown to the user.
    """

    text: str
    pip: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    links: str = ""
    release: str = ""

    def command(self) -> str:
        """Return the step as a shell command."""
        if self.release:
            return f"download llama.cpp's release {self.release}, unpack it into {FOLDER}/lib"
        if self.links:
            return f"link the CUDA libraries under the names CMake looks for, in {self.links}/lib"
        settings = [f'{name}="{value}"' for name, value in self.environment]
        words = [f"'{word}'" if set(word) & set("[]<>*") else word for word in self.pip]
        return " ".join([*settings, "pip", *words])


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """An engine that is installed rather than built.

    - `name`: its name for users and for import.
    - `distributions`: its packages.
    - `requirements`: its requirements by kind of accelerator.
    """

    name: str
    distributions: list[str]
    requirements: dict[str, list[str]]


MLX = InstalledEngine(
    **tomllib.loads(Path(__file__).with_name("mlx.toml").read_text(encoding="utf-8"))
)


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """A build for a machine.

    - `name`: its folder's name, or "own" if the installed build is already suitable.
    - `backend`: the backend that must compute in the trial.
    - `needs`: missing requirements, each with instructions to get it.
    - `library_dirs`: folders searched for shared libraries when it runs.
    - `libraries`: the folder of libllama, if the build is no package llama_cpp.
    - `effort`: what making it takes, as text for users ("" for the installed build).
    - `into_environment`: its steps change the installation itself (MLX).
    - `alternatives`: other recipes, tried in order if it cannot be made or fails its trial.
    """

    name: str
    backend: str
    title: str
    because: str
    steps: tuple[Step, ...] = ()
    needs: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()
    libraries: str = ""
    effort: str = ""
    into_environment: bool = False
    notes: tuple[str, ...] = ()
    alternatives: tuple[BuildRecipe, ...] = ()


@dataclass(frozen=True, slots=True)
class Preferred:
    """The faster of several backends on a machine, and the evidence for that."""

    backend: Accelerator
    because: str


def chain(*recipes: BuildRecipe) -> BuildRecipe:
    """Return the first of `recipes` with the others as its alternatives."""
    first, *others = recipes
    return replace(first, alternatives=(*first.alternatives, *others))


def wheel(host: BuildHost, index: str) -> Step:
    """Return the step that installs a wheel from llama-cpp-python's own index only.

    The package index has the same version as source of the CPU build.
    """
    return Step(
        f"llama-cpp-python {host.version}, ready-made",
        (
            "install",
            "--target",
            f"{FOLDER}/site",
            "--no-deps",
            "--only-binary",
            "llama-cpp-python",
            "--index-url",
            f"{_WHEELS}/{index}",
            f"llama-cpp-python=={host.version}",
        ),
    )


# CMake reads this file before it compiles llama.cpp.
COMPILER_FAULTS = Path(__file__).with_name("compiler_faults.cmake")
# The major versions of GCC that the file is about.
_FAULTY_GCC = (11, 12, 13)


def from_source(host: BuildHost, cmake: list[str]) -> Step:
    if host.gcc in _FAULTY_GCC and " " not in str(COMPILER_FAULTS):
        cmake = [*cmake, f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={COMPILER_FAULTS}"]
    return Step(
        f"llama-cpp-python {host.version}, compiled",
        (
            "install",
            "--target",
            f"{FOLDER}/site",
            "--no-deps",
            "--no-cache-dir",
            "--no-binary",
            "llama-cpp-python",
            f"llama-cpp-python=={host.version}",
        ),
        (
            ("CMAKE_ARGS", " ".join(cmake)),
            ("CMAKE_BUILD_PARALLEL_LEVEL", str(max(1, host.n_cores))),
        ),
    )


def compiler(host: BuildHost) -> list[str]:
    """Return the missing compiler with instructions to get it, or an empty list."""
    if host.cxx:
        return []
    match host.system:
        case "macos":
            return ["a C++ compiler: xcode-select --install"]
        case "windows":
            tools = "Microsoft.VisualStudio.2022.BuildTools, with its C++ workload"
            return [f"a C++ compiler: winget install {tools}"]
        case _:
            packages = "build-essential  (Fedora: sudo dnf install gcc-c++)"
            return [f"a C++ compiler: sudo apt install {packages}"]


def compile_time_text(host: BuildHost, cpu_minutes: int) -> str:
    """Return the time to compile here, as text, if one core takes `cpu_minutes`."""
    n_minutes = max(1, round(cpu_minutes / max(1, host.n_cores)))
    return f"about {n_minutes} min on {host.n_cores} cores"


def is_x86(host: BuildHost) -> bool:
    """Return True if llama-cpp-python's index has wheels for this processor on Linux and
    Windows."""
    return host.architecture in ("x86_64", "AMD64")
