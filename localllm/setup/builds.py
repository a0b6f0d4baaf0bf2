"""The builds of llama.cpp on this disk, side by side, and which one runs.

A build is a folder: `site/` holds the package llama_cpp, `toolkit/` libraries it needs,
`build.json` what it is. That file is written last, after the trial: a folder without it is
something unfinished, and is never run. "own" is the build that was installed beside localllm, which
is always there. A build is run by standing before it on Python's path, in this process and in every
child: nothing of the installation itself is changed, and going back is forgetting a name.
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
    """A build could not be made, or computes wrongly. Nothing was changed: what ran before still
    runs."""


class BuildNotFoundError(
    NotFoundError, code="build_not_found", default_hint="see `localllm setup --list`"
):
    """No build of that name is installed."""


OWN = "own"
# Holds the name that `setup --use` chose.
_CHOICE = "in-use"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}")


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build. `devices` and `trial` are what it said of itself when it was made, `made`
    the day (ISO), `drivers` what `drivers_now` said when it was last tried."""

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
    """The folder of a build of that name, whether or not it exists. Raises UsageError for what is
    no name."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a name of a build", hint="see `localllm setup --list`")
    return _root() / name


def _root() -> Path:
    """Absolute: what stands on Python's path must mean the same in another folder."""
    return paths.builds_dir().absolute()


def listed() -> list[Build]:
    """Every finished build, by name; "own" is not among them."""
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
    """The finished build that `folder` holds, of this name, or whatever it is called ("") while
    another of its name is made; None where it holds none."""
    build = json_store.record(Build, json_store.read(folder / "build.json"))
    if build is None or name not in ("", build.name):
        return None
    if not (folder / "site" / "llama_cpp").is_dir():
        return None
    return build


def finish(build: Build) -> None:
    json_store.write(build.folder / "build.json", asdict(build))


def drivers_now(root: Path = Path("/")) -> str:
    """The versions of this system's GPU drivers, as far as Linux says them: of kernel modules that
    come on their own, the kernel's where they come with it, ROCm's, and when Vulkan's drivers were
    installed. "" where there are none."""
    modules = root / "sys/module"
    versions = {name: _line(modules / name / "version") for name in ("nvidia", *_WITH_KERNEL)}
    if any((modules / name).is_dir() for name in _WITH_KERNEL):
        release = _line(root / "proc/sys/kernel/osrelease").split(".")
        versions["Linux"] = ".".join(release[:2])
    versions["ROCm"] = _line(root / "opt/rocm/.info/version")
    versions["Vulkan"] = _vulkan_drivers(root)
    return "; ".join(f"{name} {version}" for name, version in versions.items() if version)


# Drivers that come with the kernel, or on their own.
_WITH_KERNEL = ("amdgpu", "i915", "xe")


def _vulkan_drivers(root: Path) -> str:
    """A digest of Vulkan's drivers and of when they were installed; "" without any."""
    folders = (root / "usr/share/vulkan/icd.d", root / "etc/vulkan/icd.d")
    files = chain.from_iterable(folder.glob("*.json") for folder in folders)
    drivers = sorted((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    if not drivers:
        return ""
    return hashlib.sha256(repr(drivers).encode()).hexdigest()[:8]


def _line(file: Path) -> str:
    return (read_text(str(file)) or "").strip()[:80]


def stale(build: Build, drivers: str) -> str:
    """One sentence where `drivers` are not those that `build` was tried with: it may compute
    nonsense now, unnoticed."""
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
    """The name that `setup --use` chose; "own" where nobody chose or the file is damaged."""
    name = _line(_root() / _CHOICE)
    if _NAME.fullmatch(name):
        return name
    return OWN


def choose(name: str) -> None:
    """Run `name` from the next start of a model on. Raises BuildNotFoundError."""
    if name != OWN:
        named(name)
    paths.write_private(paths.private_dir(_root()) / _CHOICE, name + "\n")


def remove(name: str) -> None:
    """Delete a build; if it was in use, "own" is. Raises BuildNotFoundError, and UsageError for
    "own"."""
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
    """Have processes with this environment, and this one where its `path` (sys.path) is given, run
    the build `name`: its package and its libraries come first, and those of any other build leave.
    Raises BuildNotFoundError."""
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
    """`environment` for a build that is not finished yet: how it is tried before anything uses
    it."""
    changed = dict(environment)
    _put_first(changed, "PYTHONPATH", [str(folder / "site")])
    _put_first(changed, library_variable(), _libraries(folder, library_dirs))
    return changed


def _libraries(folder: Path, library_dirs: tuple[str, ...]) -> list[str]:
    return [entry.replace("{build}", str(folder)) for entry in library_dirs]


def library_variable() -> str:
    """The environment variable that says where this system's loader looks for shared libraries."""
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
