"""List the engines of this machine, and set up the one that `setup --engine` names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.cli import engine_builds
from localllm.device.accelerators import compiled_in
from localllm.device.library_facts import library_in
from localllm.errors import UsageError
from localllm.setup import engines, recipes, release_step, releases
from localllm.setup.steps import MLX

if TYPE_CHECKING:
    from localllm.device.types import Device
    from localllm.setup.engines import ListedEngine
    from localllm.setup.host import BuildHost
    from localllm.setup.release_step import FetchRelease
    from localllm.setup.releases import ReleaseSource
    from localllm.setup.steps import BuildRecipe

WHEEL = "wheel"
_PYTHON_RELEASE = re.compile(r"\d+(\.\d+){1,3}")
_ACCEPTED = (
    "latest, v1.0.0 or b12110 (llama.cpp's releases), wheel, a folder, an engine of "
    "`localllm setup --list`, or a release of llama-cpp-python such as 0.3.36"
)


def is_python_release(engine: str) -> bool:
    """Return True if `engine` is a version number of llama-cpp-python."""
    return _PYTHON_RELEASE.fullmatch(engine) is not None


def check(engine: str, backend: str) -> None:
    """Raise UsageError if `engine` is not something that `setup --engine` accepts."""
    if backend == MLX.name:
        raise UsageError(
            "--engine is for llama.cpp: MLX lies in localllm's own environment",
            hint="docs/engines.md shows how to try another MLX release in a separate environment",
        )
    if is_python_release(engine) or engine == WHEEL or releases.TAG.fullmatch(engine):
        return
    if _folder_recipe(engine, backend) is None:
        raise UsageError(f"--engine {engine}: not an engine", hint=f"it takes {_ACCEPTED}")


def recipe_of(engine: str, device: Device, host: BuildHost, backend: str) -> BuildRecipe:
    """Return the recipe for a release of llama.cpp, or for a library of this machine."""
    folder_recipe = _folder_recipe(engine, backend)
    if folder_recipe is not None:
        return folder_recipe
    return recipes.of_llama_cpp(engine, device, host, backend)


def resolved(recipe: BuildRecipe, source: ReleaseSource) -> BuildRecipe:
    """Name a recipe for a release after the release that its tag leads to now.

    A recipe with other alternatives is returned unchanged: they are used without a network.
    """
    if not all(alternative.libraries for alternative in (recipe, *recipe.alternatives)):
        return recipe
    for step in recipe.steps:
        if step.release:
            tag = source.find(step.release).tag
            alternatives = tuple(resolved(other, source) for other in recipe.alternatives)
            return replace(recipe, name=f"{tag}-{recipe.backend}", alternatives=alternatives)
    return recipe


def _folder_recipe(engine: str, backend: str) -> BuildRecipe | None:
    """Return the recipe for a folder or for an engine that another program installed, or None."""
    for name, source, folder in engines.installed(os.environ):
        if name == engine:
            return _library_recipe(name, source, folder, backend)
    folder = Path(engine).expanduser().absolute()
    if os.sep in engine and library_in(folder) is not None:
        name = re.sub(r"[^a-z0-9._-]+", "-", folder.parent.name.lower()).strip("-._")
        return _library_recipe(f"folder-{name}"[:40], "a folder", folder, backend)
    return None


def _library_recipe(name: str, source: str, folder: Path, backend: str) -> BuildRecipe:
    file_names = " ".join(file.name for file in folder.glob("*ggml*"))
    accelerators = compiled_in(file_names)
    backend_name = backend or next(iter(accelerators), "cpu")
    return recipes.of_folder(name, source, str(folder), backend_name)


def fetcher(
    source: ReleaseSource, device: Device, host: BuildHost, report: Callable[[str], None]
) -> FetchRelease:
    """Return the function that puts a release for this machine into a folder."""
    return partial(release_step.fetch, source, device, host, report)


def listed() -> list[ListedEngine]:
    return engines.listed(os.environ, engine_builds.configured())


def as_json(engines_listed: list[ListedEngine]) -> list[dict[str, Any]]:
    return [{**asdict(engine), "runs": bool(engine.used)} for engine in engines_listed]


def lines(engines_listed: list[ListedEngine]) -> list[str]:
    """Format the engines: three lines each, the first with the mark of the one that runs."""
    width = max(len(engine.name) for engine in engines_listed)
    text_lines = []
    for engine in engines_listed:
        mark = "*" if engine.used else " "
        text_lines.append(f"{mark} {engine.name:<{width}}  {engine.version or 'version unknown'}")
        facts = [engine.source, " and ".join(engine.accelerators)]
        if engine.n_architectures is not None:
            facts.append(f"{engine.n_architectures} architectures")
        indent = " " * (width + 4)
        text_lines.append(f"{indent}{'; '.join(filter(None, facts))}")
        text_lines.append(f"{indent}{engine.trial}")
        if engine.folder:
            text_lines.append(f"{indent}{engine.folder}")
        if engine.used:
            text_lines.append(f"{indent}runs: {engine.used}")
    return [
        *text_lines,
        "",
        "* runs. `localllm setup --use NAME` chooses one of the builds, `--engine "
        "NAME` also another program's llama.cpp; LOCALLLM_BUILD=NAME is for one run.",
    ]
