"""Resolves a MODEL reference to files on this disk.

A reference is a path, a name, a catalog id, a repository, or None for the best model installed.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store, model_names
from localllm.errors import ModelFileError, ModelNotFoundError
from localllm.library import file_kinds, folders, names, partial_files, starter, store
from localllm.library.catalog import read_header
from localllm.library.installed_names import InstalledNames
from localllm.library.types import LocalModel
from localllm.memory.system import SystemMemory
from localllm.model_names import NameMatch, Rule
from localllm_catalog.names import Format

if TYPE_CHECKING:
    from localllm_catalog.catalog import Catalog

# Larger weights, as a share of memory, leave too little for a context and for other programs.
_DEFAULT_MODEL_SHARE = 0.5
_NOT_CHAT = re.compile(
    "embed|rerank|reward|whisper|ocr-|-base|draft|guard|assistant-mtp", re.IGNORECASE
)


def resolve(ref: str | None, *, catalog: Catalog | None = None) -> LocalModel:
    """The files that `ref` means.

    None means the biggest installed chat model that fits well; the starter is one of the
    candidates. Only this disk is searched. Raises ModelNotFoundError with similar names and the
    command to fetch the model, ModelFileError for a path to something else, UsageError for a
    malformed reference.
    """
    if ref is None:
        return _best_at_hand()
    installed = InstalledNames(catalog=catalog)
    match = _match(ref, installed)
    found = best_of([model for model in match.models if not model.fault] or match.models)
    # For a path to a GGUF, the error of its header says more.
    if found.fault and (found.is_folder or match.rule is not Rule.PATH):
        raise ModelFileError(f"{found.name} can't be loaded: {found.fault}")
    if match.rule is Rule.CATALOG:
        found = replace(found, name=installed.catalog_id(ref))
    names.check_readable(found.name, found.path.name)
    return found


def find(ref: str, *, catalog: Catalog | None = None) -> list[LocalModel]:
    """All installed models that match `ref` (a name, catalog id, repository, or path); never empty.

    Raises as `resolve` does.
    """
    installed = InstalledNames(catalog=catalog)
    match = _match(ref, installed)
    if match.rule is not Rule.PATH:
        return [*match.models]
    # A path into a store returns the store's model, which also has e.g. a published hash.
    path = match.models[0].path.resolve()
    matching = [model for model in installed.models if model.path.resolve() == path]
    return matching[:1] or [*match.models]


def _match(ref: str, installed: InstalledNames) -> NameMatch[LocalModel]:
    names.check_not_empty(ref)
    match = model_names.find(ref, {Rule.PATH: _at_path, **installed.rules})
    if not match.models:
        raise installed.not_found(ref)
    return match


def _at_path(typed: str) -> list[LocalModel]:
    # The starter model's names never mean a file or folder with that name.
    if typed.lower() in starter.NAMES:
        return []
    found = by_path(typed)
    if found is None:
        return []
    return [found]


# --- a path ---------------------------------------------------------------------------------------


def by_path(ref: str) -> LocalModel | None:
    """The model at a path, or None if `ref` is no path.

    `PATH:QUANT` is the file at PATH, which must have that quant, or the file with that quant in the
    folder PATH. Raises ModelNotFoundError and ModelFileError if the path leads to no model.
    """
    if not _exists(ref):
        return _by_path_and_quant(ref)
    path = Path(ref).expanduser()
    if path.is_dir():
        return _by_folder(path)
    return _by_file(path)


def _by_path_and_quant(ref: str) -> LocalModel | None:
    path, colon, quant = ref.rpartition(":")
    if colon and not set(quant) & {"/", "\\"} and is_path(path) and _exists(path):
        return _of_quant(Path(path).expanduser(), quant)
    if is_path(ref):
        raise ModelNotFoundError(
            f"there is no file {ref!r}", hint="check the path, or see `localllm models list`"
        )
    return None


def _by_file(path: Path) -> LocalModel:
    if path.name.startswith("._"):
        file_kinds.check_is_model(path)
    joined = names.raw_part_of(path.name)
    if joined:
        raise ModelFileError(f"{path.name} is a raw part of {joined}", hint=names.join_hint(joined))
    split = names.split_of(path.name)
    if split is not None and split[1] != 1:
        path = path.with_name(names.split_parts(path.name)[0])
    found = next((m for m in folders.ggufs(_files_of(path.parent), "path") if m.path == path), None)
    if found is not None:
        return found
    if split is not None:
        raise ModelFileError(
            f"{path.name} is one of {split[2]} parts, but some parts are missing",
            hint=f"put all parts into {path.parent}",
        )
    file_kinds.check_is_model(path)
    if file_kinds.is_gguf(path.name) and not file_kinds.has_magic(path):
        read_header(path)  # its error names what the file is
    # A file with another suffix (an Ollama blob): the backend decides whether it is a model.
    name = names.shown(path.stem or path.name)
    size_bytes = path.stat().st_size
    quant = names.quant_of(path.name)
    fault = partial_files.reasons([path]).get(path, "")
    return LocalModel(name, path, Format.GGUF, size_bytes, quant, "path", "", (path,), fault=fault)


def _files_of(folder: Path) -> list[Path]:
    return next((files for _, files in folders.walk(folder, 0)), [])


def is_path(ref: str) -> bool:
    """True if `ref` looks like a path or exists as one."""
    if "://" in ref:
        return False
    if ref.startswith((".", "/", "~")) or "\\" in ref:
        return True
    return (ref.lower().endswith(".gguf") and "/" in ref) or _exists(ref)


def _exists(path: str) -> bool:
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, unknown user ("~x"), or a NUL
        return False


def _of_quant(path: Path, quant: str) -> LocalModel:
    if path.is_dir():
        found = folders.ggufs(_files_of(path), "path")
    else:
        found = [_by_file(path)]
    chosen = [m for m in found if m.quant.upper() == quant.upper()]
    if len(chosen) == 1:
        return chosen[0]
    quants = ", ".join(dict.fromkeys(m.quant or "of an unknown quant" for m in found))
    raise ModelNotFoundError(
        f"{path} is not {quant}: its quant is {quants or 'no GGUF file'}", hint="give only the file"
    )


def _by_folder(folder: Path) -> LocalModel:
    files = _files_of(folder)
    found = folders.mlx(folder, files, "path", folder.resolve().name)
    if found is not None:
        return found
    ggufs = folders.ggufs(files, "path")
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        listed = ", ".join(m.path.name for m in ggufs[:5])
        raise ModelFileError(
            f"{folder} holds {len(ggufs)} models", hint=f"choose one of them: {listed}"
        )
    raise ModelFileError(
        f"{folder} is not a model",
        hint="an MLX folder has config.json and all its "
        ".safetensors files; for GGUF, give the .gguf file",
    )


# --- the best -------------------------------------------------------------------------------------


def _best_at_hand() -> LocalModel:
    """The biggest installed chat model that leaves half of the available memory free.

    A chat model has a chat template. The starter is one of the candidates.
    """
    candidates = [m for m in store.scan() if not _NOT_CHAT.search(m.name)]
    unloadable: list[str] = []
    best = None
    for model in filter(_can_chat, _fitting_well(candidates)):
        reason = _why_unloadable(model)
        if not reason:
            best = model
            break
        unloadable.append(f"{model.name}: {reason}")
    if unloadable and best is not None:
        _report_unloadable(tuple(unloadable), best.name)
    if unloadable and best is None:
        raise ModelFileError(
            f"no installed model can be loaded. {'; '.join(unloadable)}",
            hint="see `localllm recommend` for what fits here, then `localllm pull ID`",
        )
    if best is None:
        raise ModelNotFoundError(
            "no chat model is installed",
            hint="see `localllm recommend` for what fits here, then `localllm pull ID`",
        )
    return best


def _why_unloadable(model: LocalModel) -> str:
    """The reason why no engine here can load the file, by its header; "" if it may be loaded."""
    if model.is_folder or model.origin == "starter":
        return ""
    from localllm_catalog.errors import CatalogError
    from localllm_catalog.gguf_facts import check_layout

    try:
        check_layout(read_header(model.path))
    except (CatalogError, ModelFileError) as e:
        return str(e)
    return ""


@cache
def _report_unloadable(unloadable: tuple[str, ...], instead: str) -> None:
    """Log once which larger models were passed over."""
    logging.getLogger(__name__).warning(
        f"{'; '.join(unloadable)}. {instead} is used instead; choose a model with -m MODEL"
    )


def best_of(candidates: Sequence[LocalModel]) -> LocalModel:
    """The best of several models that match a name.

    It is the biggest that is sensible and runs on this machine, else the smallest.
    """
    fitting = _fitting_well(candidates)
    if fitting:
        return fitting[0]
    return min(candidates, key=attrgetter("is_folder", "size_bytes"))


def _fitting_well(models: Sequence[LocalModel]) -> list[LocalModel]:
    """The models that run here within half of the memory available now, biggest first.

    The other half is left for a context and other programs.
    """
    has_mlx = importlib.util.find_spec("mlx_lm") is not None
    limit_bytes = (SystemMemory().available_bytes() or 0) * _DEFAULT_MODEL_SHARE
    fitting = [m for m in models if m.size_bytes <= limit_bytes and (has_mlx or not m.is_folder)]
    return sorted(fitting, key=attrgetter("size_bytes"), reverse=True)


def _can_chat(model: LocalModel) -> bool:
    """True if the files have a chat template and generate text."""
    if model.origin == "starter":
        return True
    if model.is_folder and file_kinds.of_folder(model.path) != "model":
        return False
    if model.is_folder:
        config = json_store.read(model.path / "tokenizer_config.json")
        return bool(config.get("chat_template")) or (model.path / "chat_template.jinja").is_file()
    try:
        header = read_header(model.path)
    except ModelFileError:
        return False
    return (
        bool(header.text("tokenizer.chat_template")) and file_kinds.of_header(model.path) == "model"
    )
