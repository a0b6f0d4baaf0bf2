"""What a build is made by: recipes, their steps, and the steps that several of them share. Pure, so
they can be shown before."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.device.types import Accelerator
from localllm.setup.host import BuildHost

# Stands in a step for the folder of the build, which is known when it is made.
FOLDER = "{build}"
TOOLKIT = f"{FOLDER}/toolkit"
_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that is done: `pip` arguments with what is added to the environment, or (`links`)
    the file names that CMake looks for in the toolkit's folder. `said` is for people."""

    said: str
    pip: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    links: str = ""

    def command(self) -> str:
        """The step as a line for a shell."""
        if self.links:
            return f"link the CUDA libraries under the names CMake looks for, in {self.links}/lib"
        settings = [f'{name}="{value}"' for name, value in self.environment]
        words = [f"'{word}'" if set(word) & set("[]<>*") else word for word in self.pip]
        return " ".join([*settings, "pip", *words])


@dataclass(frozen=True, slots=True)
class InstalledEngine:
    """An engine that is installed rather than built: the name it is asked for and imported by, its
    distributions, and its requirements by the kind of device that computes."""

    name: str
    distributions: list[str]
    requirements: dict[str, list[str]]


MLX = InstalledEngine(
    **tomllib.loads(Path(__file__).with_name("mlx.toml").read_text(encoding="utf-8"))
)


@dataclass(frozen=True, slots=True)
class BuildRecipe:
    """A build for a machine.
    `name` is its folder's, "own" where the installed one already is right.
    `backend` is what the trial must find at work;
    `needs` is what is missing here, each with how to get it;
    `library_dirs` are searched for shared libraries when it runs.
    `into_environment`: its steps change the installation itself (MLX).
    `otherwise`: what is made where this one can't be or fails its trial, in this order."""

    name: str
    backend: str
    title: str
    because: str
    steps: tuple[Step, ...] = ()
    needs: tuple[str, ...] = ()
    library_dirs: tuple[str, ...] = ()
    takes: str = ""
    into_environment: bool = False
    notes: tuple[str, ...] = ()
    otherwise: tuple[BuildRecipe, ...] = ()


@dataclass(frozen=True, slots=True)
class Preferred:
    """Which of several backends a machine runs faster with, and how that is known."""

    backend: Accelerator
    because: str


def chain(*recipes: BuildRecipe) -> BuildRecipe:
    """The first of `recipes`, the others after it where it fails."""
    first, *others = recipes
    return replace(first, otherwise=(*first.otherwise, *others))


def wheel(host: BuildHost, index: str) -> Step:
    """A wheel of llama-cpp-python's own index alone: the package index has the same version as a
    source of the CPU build."""
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


def from_source(host: BuildHost, cmake: list[str]) -> Step:
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
    """The compiler that is missing, with how to get it; nothing where one is here."""
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


def minutes(host: BuildHost, cpu_minutes: int) -> str:
    """The time that a compilation of so many minutes on one core takes here."""
    here = max(1, round(cpu_minutes / max(1, host.n_cores)))
    return f"about {here} min on {host.n_cores} cores"


def is_x86(host: BuildHost) -> bool:
    """Whether llama-cpp-python's index has wheels for this processor, but for Macs."""
    return host.architecture in ("x86_64", "AMD64")
