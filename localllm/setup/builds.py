"""Manage the builds of llama.cpp on this disk, and choose which one runs.

A build is a folder. `site/` holds the package llama_cpp, `toolkit/` the libraries it needs, and
`build.json` its description. That file is written last, after the trial. A folder without it is
unfinished and is never run.

"own" is the build that was installed with localllm. It is always available. A build runs because
its folder comes first on Python's path, in this process and in every child. The installation itself
is not changed, so going back only means choosing another name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from localllm import json_store, paths
from localllm.device.probes import read_text
from localllm.errors import LocalLLMError, NotFoundError, UsageError


class SetupError(
    LocalLLMError,
    code="setup_failed",
    exit_code=6,
    default_hint="what ran before still runs; see the log named above",
):
    """A build could not be made, or computes wrong results. The previous build still runs."""


class BuildNotFoundError(
    NotFoundError, code="build_not_found", default_hint="see `localllm setup --list`"
):
    """No build with this name is installed."""


OWN = "own"
# File with the name that `setup --use` chose.
_CHOICE = "in-use"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build.

    - `devices`, `trial`: its devices and the result of its trial when it was made.
    - `made`: the day it was made (ISO).
    - `drivers`: result of `drivers_now` at its last trial.
    """

    name: str
    backend: str
    title: str
    version: str
    made: str
    devices: tuple[str, ...] = ()
    trial: str = ""
    library_dirs: tuple[str, ...] = ()
    drivers: str = ""

    @property
    def folder(self) -> Path:
        return folder_of(self.name)


def folder_of(name: str) -> Path:
    """Return the folder of a build with this name, whether or not it exists.

    Raises UsageError for an invalid name.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name of a build", hint="see `localllm setup --list`")
    return _root() / name


def _root() -> Path:
    """Return the absolute path, because entries of Python's path must be valid from any folder."""
    return paths.builds_dir().absolute()


def listed() -> list[Build]:
    """Return every finished build except "own", sorted by name."""
    found = [read(file.parent, file.parent.name) for file in sorted(_root().glob("*/build.json"))]
    return [build for build in found if build is not None]


def named(name: str) -> Build:
    build = read(folder_of(name), name)
    if build is None:
        there = ", ".join([OWN, *(b.name for b in listed())])
        raise BuildNotFoundError(
            f"there is no build {name!r}", hint=f"installed: {there}; `localllm setup` makes more"
        )
    return build


def read(folder: Path, name: str = "") -> Build | None:
    """Return the finished build in `folder`, or None if the folder has no finished build.

    The build must have this `name`, unless it is "". While a build is made anew, the old one is in
    a folder with another name.
    """
    build = json_store.record(Build, json_store.read(folder / "build.json"))
    if build is None or name not in ("", build.name):
        return None
    if not (folder / "site" / "llama_cpp").is_dir():
        return None
    return build


def finish(build: Build) -> None:
    json_store.write(build.folder / "build.json", asdict(build))


def drivers_now(root: Path = Path("/")) -> str:
    """Return the versions of this system's GPU drivers, as far as Linux reports them.

    These are the versions of kernel modules that are released separately, the kernel's version for
    modules that are part of it, ROCm's version, and a digest of Vulkan's drivers. Returns ""
    without any.
    """
    modules = root / "sys/module"
    versions = {name: _line(modules / name / "version") for name in ("nvidia", *_WITH_KERNEL)}
    if any((modules / name).is_dir() for name in _WITH_KERNEL):
        release = _line(root / "proc/sys/kernel/osrelease").split(".")
        versions["Linux"] = ".".join(release[:2])
    versions["ROCm"] = _line(root / "opt/rocm/.info/version")
    versions["Vulkan"] = _vulkan_drivers(root)
    return "; ".join(f"{name} {version}" for name, version in versions.items() if version)


# Drivers that are part of the kernel or released separately.
_WITH_KERNEL = ("amdgpu", "i915", "xe")


def _vulkan_drivers(root: Path) -> str:
    """Return a digest of Vulkan's drivers and their installation times, or "" without drivers."""
    folders = (root / "usr/share/vulkan/icd.d", root / "etc/vulkan/icd.d")
    files = chain.from_iterable(folder.glob("*.json") for folder in folders)
    drivers = sorted((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    if not drivers:
        return ""
    return hashlib.sha256(repr(drivers).encode()).hexdigest()[:8]


def _line(file: Path) -> str:
    return (read_text(str(file)) or "").strip()[:80]


def stale(build: Build, drivers: str) -> str:
    """Return one sentence if `drivers` differ from those in `build`'s last trial, or "".

    With other drivers, a build may compute wrong results without an error.
    """
    if not build.drivers or not drivers or build.drivers == drivers:
        return ""
    before = build.drivers.split("; ")
    now = drivers.split("; ")
    changed = ", ".join(said for said in now if said not in before) or "one is gone"
    return (
        f"the GPU's drivers changed since the build {build.name} was tried ({changed}): "
        "`localllm setup` tries it again"
    )


def chosen() -> str:
    """Return the name that `setup --use` chose.

    Returns "own" if there was no choice or the file is damaged.
    """
    name = _line(_root() / _CHOICE)
    if _NAME.fullmatch(name):
        return name
    return OWN


def choose(name: str) -> None:
    """Use the build `name` for models started from now on. Raises BuildNotFoundError."""
    if name != OWN:
        named(name)
    paths.write_private(paths.private_dir(_root()) / _CHOICE, name + "\n")


def remove(name: str) -> None:
    """Delete a build. If it was in use, "own" is used from now on.

    Raises BuildNotFoundError, and UsageError for "own".
    """
    if name == OWN:
        raise UsageError(
            "the build that came with localllm can't be removed", hint="localllm setup --list"
        )
    folder = folder_of(name)
    if not folder.is_dir():
        named(name)
    if chosen() == name:
        choose(OWN)
    shutil.rmtree(folder)


def apply(name: str, environment: MutableMapping[str, str], path: list[str] | None = None) -> None:
    """Make processes with this environment run the build `name`.

    The build's package and libraries are put first, and those of other builds are removed. If
    `path` (sys.path) is given, this process also runs the build. Raises BuildNotFoundError.
    """
    site: list[str] = []
    libraries: list[str] = []
    if name != OWN:
        build = named(name)
        site = [str(build.folder / "site")]
        libraries = _libraries(build.folder, build.library_dirs)
    _put_first(environment, "PYTHONPATH", site)
    _put_first(environment, library_variable(), libraries)
    if path is not None:
        path[:] = [*site, *(entry for entry in path if not _is_of_a_build(entry))]


def with_folder(
    folder: Path, library_dirs: tuple[str, ...], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return `environment` for a build that is not finished yet, to test it before use."""
    changed = dict(environment)
    _put_first(changed, "PYTHONPATH", [str(folder / "site")])
    _put_first(changed, library_variable(), _libraries(folder, library_dirs))
    return changed


def _libraries(folder: Path, library_dirs: tuple[str, ...]) -> list[str]:
    return [entry.replace("{build}", str(folder)) for entry in library_dirs]


def library_variable() -> str:
    """Return the environment variable with the search path of this system's library loader."""
    match sys.platform:
        case "darwin":
            return "DYLD_LIBRARY_PATH"
        case "win32":
            return "PATH"
        case _:
            return "LD_LIBRARY_PATH"


def _put_first(environment: MutableMapping[str, str], variable: str, entries: list[str]) -> None:
    others = [
        e for e in environment.get(variable, "").split(os.pathsep) if e and not _is_of_a_build(e)
    ]
    if entries or variable in environment:
        environment[variable] = os.pathsep.join([*entries, *others])
    if not environment.get(variable, "x"):
        del environment[variable]


def _is_of_a_build(entry: str) -> bool:
    return bool(entry) and Path(entry).is_relative_to(_root())
