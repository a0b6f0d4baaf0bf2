"""Finds models in a folder by names and sizes, without opening weights.

Models are complete GGUFs (splits combined) and MLX folders.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

from localllm import json_store
from localllm.library import file_kinds, names, partial_files
from localllm.library.file_kinds import is_gguf
from localllm.library.types import LocalModel, Origin
from localllm_catalog.names import Format

_MAX_FILES = 20_000
# Maximum depth of nested folders. It also ends the search if links form a cycle.
DEPTH = 16
# Text generators. The other folders with safetensors in a hub cache (encoders, diffusion models)
# are not usable here.
_TEXT_ARCHITECTURES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")


# The file of an MLX folder that lists its weights' shards.
INDEX = "model.safetensors.index.json"


def walk(folder: Path, depth: int) -> Iterator[tuple[Path, list[Path]]]:
    """Every folder down to `depth` levels with its sorted files.

    Links to folders and hidden folders are not followed.
    """
    budget = _MAX_FILES
    # Breadth first: files deep in a large tree must not use up the budget of those above them.
    pending = deque([(folder, 0)])
    while pending and budget > 0:
        current, level = pending.popleft()
        files: list[Path] = []
        try:
            with os.scandir(current) as entries:
                for entry in sorted(entries, key=attrgetter("name")):
                    budget -= 1
                    if entry.is_dir(follow_symlinks=False):
                        if level < depth and not entry.name.startswith("."):
                            pending.append((Path(entry.path), level + 1))
                    elif _is_plain(entry):
                        files.append(Path(entry.path))
        except OSError:
            continue
        yield current, files


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """True for a regular file, a link to one, and a dangling link.

    Opening a pipe waits for its writer, and a device may have no end.
    """
    try:
        return entry.is_file() or (entry.is_symlink() and not os.path.exists(entry.path))
    except OSError:  # a link to itself
        return True


def files_below(folder: Path, depth: int = DEPTH) -> list[Path]:
    """All files that `walk` finds."""
    return list(chain.from_iterable(files for _, files in walk(folder, depth)))


def ggufs(
    files: list[Path], origin: Origin, repo: str = "", root: Path | None = None
) -> list[LocalModel]:
    """The GGUF models among `files`. A split counts once, and only if all parts exist.

    `files` come from one folder or, if `root` is given, from all folders of the repository at
    `root`. Each projector is attached to its model. Other non-model files become the model's
    companions.
    """
    named = {_name_below(root, file): file for file in files if is_gguf(file.name)}
    if not named:
        return []
    from localllm_catalog.kinds import MODELS

    weights: dict[str, Path] = {}
    projectors: dict[str, Path] = {}
    others: list[tuple[str, Path]] = []
    for name, (file, kind) in file_kinds.of_files(named).items():
        if kind in MODELS:
            weights[name] = file
            continue
        others.append((str(kind), file))
        if kind == "projector":
            projectors[name] = file
    partial = partial_files.reasons([*weights.values(), *projectors.values()])
    sizes = {name: _total_size([file]) for name, file in weights.items()}
    found = []
    for name, parts in names.complete_models(sizes):
        file = weights[name]
        projector = _own_projector(name, weights, projectors, partial, one_repo=bool(repo))
        quant = names.quant_of(file.name) or names.quant_of(name)
        companions = tuple(other for other in others if other[1] != projector)
        part_files = tuple(weights[part] for part in parts)
        found.append(
            LocalModel(
                names.shown(names.stem_of(name)),
                file,
                Format.GGUF,
                sum(sizes[part] for part in parts),
                quant,
                origin,
                repo,
                part_files,
                projector,
                companions,
                _fault(part_files, partial),
                _fault((projector,), partial),
            )
        )
    return found


def _fault(files: Sequence[Path | None], partial: Mapping[Path, str]) -> str:
    """Why the first of `files` that is `partial` can't be loaded; "" if there is none."""
    return next((partial[file] for file in filter(None, files) if file in partial), "")


def _name_below(root: Path | None, file: Path) -> str:
    """The file's name, including its folders below `root` if `root` is given."""
    if root is None:
        return file.name
    return str(file.relative_to(root)).replace(os.sep, "/")


def _own_projector(
    name: str,
    weights: dict[str, Path],
    projectors: dict[str, Path],
    partial: Collection[Path],
    *,
    one_repo: bool,
) -> Path | None:
    """The projector of the model `name`, matched by file name.

    If no name matches, the projector whose header names the model or its base is used. One of the
    `partial` files is used only if there is no whole one.
    """
    from localllm_catalog import kinds

    if not projectors:
        return None
    mine = kinds.own_projectors(name, list(weights), list(projectors), one_repo=one_repo)
    if not mine:
        model_names = file_kinds.names_in_header(weights[name])
        mine = [
            p for p, file in projectors.items() if model_names & file_kinds.names_in_header(file)
        ]
    mine = [p for p in mine if projectors[p] not in partial] or mine
    best = names.best_projector({p: _total_size([projectors[p]]) for p in mine})
    if best is not None:
        return projectors[best]
    return None


def mlx(
    folder: Path, files: list[Path], origin: Origin, name: str, repo: str = ""
) -> LocalModel | None:
    """The MLX (or plain Hugging Face) text model in `folder`.

    None unless the folder has a config.json and all shards. A shard that is cut short is its fault.
    """
    from localllm_catalog.kinds import is_drafter_config

    by_name = {f.name: f for f in files}
    shards = [by_name[name] for name in names.mlx_weights(by_name)]
    size = _total_size(shards)
    if "config.json" not in by_name or not size:
        return None
    config = json_store.read(by_name["config.json"])
    if is_drafter_config(config):
        return None
    quantized = config.get("quantization") or config.get("quantization_config")
    if not quantized and not _makes_text(config):
        return None
    index = by_name.get(INDEX)
    if index is not None and not shards_of(index) <= set(by_name):
        return None
    partial = partial_files.reasons(shards)
    return LocalModel(
        names.shown(name),
        folder,
        Format.MLX,
        size,
        _mlx_quant(name, quantized, config),
        origin,
        repo,
        tuple(shards),
        fault=next((f"{file.name}: {why}" for file, why in partial.items()), ""),
    )


def _makes_text(config: dict[str, Any]) -> bool:
    architectures = config.get("architectures") or []
    named = [name for name in architectures if isinstance(name, str)]
    return any(name.endswith(_TEXT_ARCHITECTURES) for name in named)


def shards_of(index: Path) -> set[str]:
    """The file names listed in a weights index."""
    weight_map = json_store.read(index).get("weight_map")
    if not isinstance(weight_map, dict):
        return set()
    return {str(name) for name in weight_map.values()}


def _mlx_quant(name: str, quantized: Any, config: dict[str, Any]) -> str:
    if isinstance(quantized, dict):
        if quantized.get("quant_method") and "quantization" not in config:
            return str(quantized["quant_method"])[:20]
        mode = quantized.get("mode")
        bits = quantized.get("bits")
        if isinstance(mode, str) and mode not in ("affine", ""):
            return mode
        if isinstance(bits, int):
            return f"{bits}bit"
    named = names.mlx_quant_of(name)
    if named:
        return named
    kind = config.get("torch_dtype") or config.get("dtype")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(str(kind), "")


def _total_size(parts: list[Path]) -> int:
    """Total bytes of all parts, or 0 if a part is missing (a dangling link) or empty."""
    try:
        sizes = [part.stat().st_size for part in parts]
    except OSError:
        return 0
    if all(sizes):
        return sum(sizes)
    return 0


def scan(
    folder: Path, origin: Origin = "folder", *, repo_of_folder: bool = False
) -> list[LocalModel]:
    """All models below `folder`.

    `repo_of_folder` means the layout is publisher/model/files, as on the hub.
    """
    found: list[LocalModel] = []
    of_repo: dict[str, list[Path]] = {}
    for current, files in walk(folder, DEPTH):
        repo = "/".join(current.relative_to(folder).parts[:2])
        if not repo_of_folder or not names.safe_repo(repo):
            repo = ""
        if repo:
            of_repo.setdefault(repo, []).extend(files)
        else:
            found += ggufs(files, origin)
        model = mlx(current, files, origin, current.name, repo)
        if model is not None:
            found.append(model)
    for repo, files in of_repo.items():
        found += ggufs(files, origin, repo, folder / repo)
    return found
