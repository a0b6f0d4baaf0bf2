"""List the engines of this machine: llama.cpp libraries, their source, and which one runs.

The sources are the wheel that localllm was installed with, the builds of `localllm setup`, and
libraries that other programs installed.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from localllm.device.accelerators import compiled_in
from localllm.device.library_facts import architectures_of, library_in, version_in
from localllm.setup import builds
from localllm.setup.builds import Build
from localllm.setup.host import installed_version

_HOMEBREW_FOLDERS = (
    "/opt/homebrew/lib",
    "/usr/local/opt/llama.cpp/lib",
    "/home/linuxbrew/.linuxbrew/lib",
)


@dataclass(frozen=True, slots=True)
class ListedEngine:
    """One engine of this machine.

    - `source`: its origin, such as "the wheel" or "Homebrew".
    - `accelerators`: the accelerators that it has libraries for.
    - `n_architectures`: how many kinds of models it can read, at least (None: unknown).
    - `folder`: the folder of its libraries.
    - `trial`: the result of its trial, or the reason why it is no longer used.
    - `used`: the reason why it runs, or "" if another one runs.
    """

    name: str
    source: str
    version: str
    accelerators: tuple[str, ...]
    n_architectures: int | None
    folder: str
    trial: str
    used: str = ""


def listed(environment: Mapping[str, str], configured: str) -> list[ListedEngine]:
    """Return all engines, the wheel first.

    `configured` is the build that config.toml names, or "".
    """
    name, reason = _running_engine(environment, configured)
    engines = [_wheel_engine(reason if name == builds.OWN else "")]
    for build in builds.listed():
        engines.append(_engine_of_build(build, reason if name == build.name else ""))
    folders_in_use = {engine.folder for engine in engines}
    for external_name, source, folder in installed(environment):
        if str(folder) not in folders_in_use:
            used = reason if name == external_name else ""
            engines.append(_engine(external_name, source, version_in(folder), folder, "", used))
    return engines


def _running_engine(environment: Mapping[str, str], configured: str) -> tuple[str, str]:
    """Return the name of the engine that runs, and the reason."""
    folder = environment.get(builds.LIBRARY_VARIABLE, "")
    if folder and not builds.is_build_library(folder):
        return "environment", f"{builds.LIBRARY_VARIABLE} names its folder"
    requested = environment.get("LOCALLLM_BUILD", "")
    if requested:
        return requested, "LOCALLLM_BUILD names it"
    if configured:
        return configured, "config.toml names it"
    chosen = builds.chosen()
    if chosen == builds.OWN:
        return chosen, "no other one was chosen"
    return chosen, "`localllm setup` chose it"


def _wheel_engine(used: str) -> ListedEngine:
    version = installed_version() or "not installed"
    spec = PathFinder.find_spec("llama_cpp", builds.without_builds(sys.path))
    if spec is None or spec.origin is None:
        return ListedEngine(builds.OWN, "the wheel", version, (), None, "", "", used)
    folder = Path(spec.origin).parent / "lib"
    llama_version = version_in(folder)
    if llama_version:
        version += f" (llama.cpp {llama_version})"
    return _engine(builds.OWN, "the wheel", version, folder, "", used)


def _engine_of_build(build: Build, used: str) -> ListedEngine:
    trial = "; ".join((build.made, *build.devices, build.trial))
    if build.fault:
        trial = f"not used any more: {build.fault}"
    return _engine(build.name, build.title, build.version, build.library_folder, trial, used)


def _engine(
    name: str, source: str, version: str, folder: Path, trial: str, used: str
) -> ListedEngine:
    n_architectures = None
    library = library_in(folder)
    if library is not None:
        architectures = architectures_of(library)
        if architectures is not None and architectures.listed:
            n_architectures = len(architectures.listed)
    files = " ".join(sorted(file.name for file in folder.glob("*ggml*")))
    accelerators = tuple(dict.fromkeys((*compiled_in(files), "cpu")))
    trial = trial or "not tried"
    if name == builds.OWN:
        trial = "other engines are compared with it"
    return ListedEngine(
        name, source, version, accelerators, n_architectures, str(folder), trial, used
    )


def installed(environment: Mapping[str, str]) -> Iterator[tuple[str, str, Path]]:
    """Yield name, source and library folder of each llama.cpp that other programs installed."""
    folder_named = environment.get(builds.LIBRARY_VARIABLE, "")
    if (
        folder_named
        and not builds.is_build_library(folder_named)
        and library_in(Path(folder_named)) is not None
    ):
        yield "environment", builds.LIBRARY_VARIABLE, Path(folder_named)
    for name, source, folders in _usual_folders(environment):
        for folder in folders:
            if library_in(folder) is not None:
                yield name, source, folder
                break


def _usual_folders(environment: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[Path, ...]]]:
    yield "homebrew", "Homebrew", tuple(map(Path, _HOMEBREW_FOLDERS))
    conda = environment.get("CONDA_PREFIX", "")
    if conda:
        yield "conda", "conda", (Path(conda, "lib"), Path(conda, "Library", "bin"))
    if os.name == "posix":
        triplet = str(sysconfig.get_config_var("MULTIARCH") or "")
        folders = [Path("/usr/lib64"), Path("/usr/lib"), Path("/usr/local/lib")]
        if triplet:
            folders.insert(0, Path("/usr/lib", triplet))
        yield "system", "the system's packages", tuple(folders)
