"""Manage the builds of llama.cpp on this disk, and choose which one runs.

A build is a folder. `site/` holds the package llama_cpp, `toolkit/` the libraries it needs, and
`build.json` its description. That file is written last, after the trial. A folder without it is
unfinished and is never run. A release of llama.cpp has `lib/` and `include/` in place of `site/`. A
llama.cpp that another program installed is not moved.

"own" is the build that was installed with localllm. It is always available. A package runs because
its folder comes first on Python's path, in this process and in every child. A folder of libraries
runs because LLAMA_CPP_LIB_PATH names it. The installation itself is not changed, so going back only
means choosing another name.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from localllm import json_store, paths
from localllm.device.probes import LIBRARY_VARIABLE as LIBRARY_VARIABLE
from localllm.device.probes import read_text
from localllm.errors import LocalLLMError, NotFoundError, UsageError


class SetupError(
    LocalLLMError,
    code="setup_failed",
    exit_code=6,
    default_hint="the previous build stays in use; see the log named above",
):
    """A build could not be made, or computes wrong results. The previous build still runs."""


class BuildNotFoundError(
    NotFoundError, code="build_not_found", default_hint="see `localllm setup --list`"
):
    """No build with this name is installed."""


OWN = "own"
# File with the name that `setup --use` chose, and the one with the name of the build before it.
_CHOICE = "in-use"
_PREVIOUS_CHOICE = "used-before"
# File in a build's folder that counts failed loads.
_FAILED_LOADS = "failed-loads"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build.

    - `devices`, `trial`: its devices and the result of its trial when it was made.
    - `made`: the day it was made (ISO).
    - `drivers`: result of `drivers_now` at its last trial.
    - `libraries`: the folder of libllama, or "" if the build is a package llama_cpp. "{build}"
      is replaced by the build's folder.
    - `fault`: the reason why it is no longer used, or "".
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
    libraries: str = ""
    fault: str = ""

    @property
    def folder(self) -> Path:
        return folder_of(self.name)

    @property
    def library_folder(self) -> Path:
        """The folder of libllama."""
        if self.libraries:
            return Path(_with_build_folder(self.libraries, self.folder))
        return self.folder / "site" / "llama_cpp" / "lib"


def folder_of(name: str) -> Path:
    """Return the folder of a build with this name, whether or not it exists.

    Raises UsageError for an invalid name.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a build name", hint="see `localllm setup --list`")
    return _root() / name


def _root() -> Path:
    """Return the absolute path, because entries of Python's path must be valid from any folder."""
    return paths.builds_dir().absolute()


def listed() -> list[Build]:
    """Return every finished build except "own", sorted by name."""
    builds = [read(file.parent, file.parent.name) for file in sorted(_root().glob("*/build.json"))]
    return [build for build in builds if build is not None]


def named(name: str) -> Build:
    build = read(folder_of(name), name)
    if build is None:
        names = ", ".join([OWN, *(b.name for b in listed())])
        raise BuildNotFoundError(
            f"there is no build {name!r}",
            hint=f"installed: {names}; `localllm setup` makes a new one",
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
    library_folder = folder / "site" / "llama_cpp"
    if build.libraries:
        library_folder = Path(_with_build_folder(build.libraries, folder))
    if not library_folder.is_dir():
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
    versions = {
        name: _short_text(modules / name / "version") for name in ("nvidia", *_KERNEL_MODULES)
    }
    if any((modules / name).is_dir() for name in _KERNEL_MODULES):
        release = _short_text(root / "proc/sys/kernel/osrelease").split(".")
        versions["Linux"] = ".".join(release[:2])
    versions["ROCm"] = _short_text(root / "opt/rocm/.info/version")
    versions["Vulkan"] = _vulkan_drivers(root)
    return "; ".join(f"{name} {version}" for name, version in versions.items() if version)


# Drivers that are part of the kernel or released separately.
_KERNEL_MODULES = ("amdgpu", "i915", "xe")


def _vulkan_drivers(root: Path) -> str:
    """Return a digest of Vulkan's drivers and their installation times, or "" without drivers."""
    folders = (root / "usr/share/vulkan/icd.d", root / "etc/vulkan/icd.d")
    files = chain.from_iterable(folder.glob("*.json") for folder in folders)
    drivers = sorted((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    if not drivers:
        return ""
    return hashlib.sha256(repr(drivers).encode()).hexdigest()[:8]


def _short_text(file: Path) -> str:
    return (read_text(str(file)) or "").strip()[:80]


def why_stale(build: Build, drivers: str) -> str:
    """Return one sentence if `drivers` differ from those in `build`'s last trial, or "".

    With other drivers, a build may compute wrong results without an error.
    """
    if not build.drivers or not drivers or build.drivers == drivers:
        return ""
    earlier = build.drivers.split("; ")
    now = drivers.split("; ")
    changes = ", ".join(change for change in now if change not in earlier) or "one was removed"
    return (
        f"the GPU's drivers changed since the build {build.name} was tested ({changes}): "
        "`localllm setup` tests it again"
    )


def chosen() -> str:
    """Return the name that `setup --use` chose.

    Returns "own" if there was no choice or the file is damaged.
    """
    name = _short_text(_root() / _CHOICE)
    if _NAME.fullmatch(name):
        return name
    return OWN


def choose(name: str) -> None:
    """Use the build `name` for models started from now on. Raises BuildNotFoundError.

    The build that was chosen until now is the one to return to.
    """
    if name != OWN:
        named(name)
    previous = chosen()
    folder = paths.private_dir(_root())
    if previous != name:
        paths.write_private(folder / _PREVIOUS_CHOICE, previous + "\n")
    paths.write_private(folder / _CHOICE, name + "\n")


def last_good() -> str:
    """Return the build that was chosen before the current one and has no fault, or "own"."""
    name = _short_text(_root() / _PREVIOUS_CHOICE)
    if not _NAME.fullmatch(name) or name == chosen():
        return OWN
    build = read(folder_of(name), name)
    if build is None or build.fault:
        return OWN
    return name


def remove(name: str) -> None:
    """Delete a build. If it was in use, "own" is used from now on.

    Raises BuildNotFoundError, and UsageError for "own".
    """
    if name == OWN:
        raise UsageError(
            "the build installed with localllm can't be removed", hint="localllm setup --list"
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
    build = None
    site_folders: list[str] = []
    library_folders: list[str] = []
    if name != OWN:
        build = named(name)
        library_folders = [_with_build_folder(entry, build.folder) for entry in build.library_dirs]
        if not build.libraries:
            site_folders = [str(build.folder / "site")]
    _put_first(environment, "PYTHONPATH", site_folders)
    _put_first(environment, library_variable(), library_folders)
    if is_build_library(environment.get(LIBRARY_VARIABLE, "")):
        del environment[LIBRARY_VARIABLE]
    if build is not None and build.libraries:
        # A folder that the user named in the environment has priority.
        environment.setdefault(LIBRARY_VARIABLE, str(build.library_folder))
    if path is not None:
        path[:] = [*site_folders, *without_builds(path)]


def without_builds(path: Sequence[str]) -> list[str]:
    """Return the entries of Python's path that are not folders of builds."""
    return [entry for entry in path if not _is_in_builds_folder(entry)]


def go_back(reason: str) -> str:
    """Use the last good build in place of the chosen one, and return its name.

    The chosen build is kept, with `reason` as its fault.
    """
    faulty = chosen()
    previous = last_good()
    if faulty != OWN:
        finish(replace(named(faulty), fault=reason))
    choose(previous)
    return previous


def count_failed_load(name: str) -> int:
    """Count one more load in a row during which the build's process ended. Returns the count."""
    file = folder_of(name) / _FAILED_LOADS
    text = _short_text(file)
    count = 1
    if text.isdecimal():
        count += int(text)
    paths.write_private(file, f"{count}\n")
    return count


def forget_failed_loads(name: str) -> None:
    """Start counting again, after a load that succeeded."""
    (folder_of(name) / _FAILED_LOADS).unlink(missing_ok=True)


def is_build_library(folder: str) -> bool:
    """Return True if `folder` is the library folder of a build here."""
    return bool(folder) and any(
        build.libraries and build.library_folder == Path(folder) for build in listed()
    )


def own_build_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `environment` (None: this process's) with the build that came with localllm."""
    own_environment = dict(os.environ if environment is None else environment)
    apply(OWN, own_environment)
    own_environment.pop(LIBRARY_VARIABLE, None)
    return own_environment


def with_folder(
    folder: Path,
    library_dirs: tuple[str, ...],
    environment: Mapping[str, str],
    libraries: str = "",
) -> dict[str, str]:
    """Return `environment` for a build that is not finished yet, to test it before use."""
    build_environment = dict(environment)
    if libraries:
        build_environment[LIBRARY_VARIABLE] = _with_build_folder(libraries, folder)
    else:
        _put_first(build_environment, "PYTHONPATH", [str(folder / "site")])
    _put_first(
        build_environment,
        library_variable(),
        [_with_build_folder(entry, folder) for entry in library_dirs],
    )
    return build_environment


def _with_build_folder(entry: str, folder: Path) -> str:
    return entry.replace("{build}", str(folder))


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
    other_entries = [
        entry
        for entry in environment.get(variable, "").split(os.pathsep)
        if entry and not _is_in_builds_folder(entry)
    ]
    if entries or variable in environment:
        environment[variable] = os.pathsep.join([*entries, *other_entries])
    if not environment.get(variable, "x"):
        del environment[variable]


def _is_in_builds_folder(entry: str) -> bool:
    return bool(entry) and Path(entry).is_relative_to(_root())
