"""The kind of each GGUF file on this disk: by its header if readable, else by its name and
place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm import json_store
from localllm.errors import ModelFileError
from localllm.library import names
from localllm_catalog.errors import CatalogError

if TYPE_CHECKING:
    from localllm_catalog.gguf import Value
    from localllm_catalog.kinds import Kind

_NAMES = re.compile(r"general\.(?:name|basename)|general\.base_model\.[0-9]+\.(?:name|repo_url)")


def is_gguf(name: str) -> bool:
    """True if the name ends in .gguf (in any case) and is not a macOS side file ("._…")."""
    return name.lower().endswith(".gguf") and not name.rpartition("/")[2].startswith("._")


def of_files(files: Mapping[str, Path]) -> dict[str, tuple[Path, Kind]]:
    """The kind of each of these GGUF files, by name within one folder or repository.

    The first part of a split determines the kind of the split. The header takes precedence over the
    name, with one exception: a complete model named as a draft next to a larger one is a drafter.
    Files that can't be read, or that are no GGUF files by their first bytes, are left out.
    """
    from localllm_catalog import kinds

    sizes: dict[str, int] = {}
    for name, file in files.items():
        with suppress(OSError):
            sizes[name] = file.stat().st_size
    found: dict[str, tuple[Path, Kind]] = {}
    for name, place in kinds.among(sizes).items():
        kind = place
        stated = of_header(files[name]) if names.is_first_part(name) else None
        if stated is None and not has_magic(files[name]):
            continue
        is_drafter = place == "drafter" and stated in kinds.MODELS
        if stated is not None and not is_drafter:
            kind = stated
        found[name] = files[name], kind
    return found


def of_header(file: Path) -> Kind | None:
    """The kind that a GGUF file's header states, or None if it can't be read as GGUF."""
    from localllm_catalog import kinds

    header = _peeked(file)
    if header is None:
        if _is_pointer(file):
            return "pointer"
        return None
    metadata, n_tensors = header
    if names.split_of(file.name) is not None:
        # The first part may hold no tensors of its own (llama-gguf-split --no-tensor-first-split).
        n_tensors = 1
    return kinds.of_header(metadata, n_tensors)


def of_folder(folder: Path) -> Kind:
    """The kind of a checkpoint folder: "embedding", "reranker" or "model".

    sentence-transformers writes modules.json into the folders of embedding models.
    """
    if (folder / "modules.json").is_file():
        return "embedding"
    architectures = json_store.read(folder / "config.json").get("architectures") or []
    named = [name for name in architectures if isinstance(name, str)]
    if any(name.endswith("ForSequenceClassification") for name in named):
        return "reranker"
    if any(name.endswith("Model") and not name.endswith("HeadModel") for name in named):
        return "embedding"
    return "model"


def has_magic(file: Path) -> bool:
    """True if the first bytes of a regular file are those of every GGUF file."""
    try:
        if not file.is_file():
            return False
        with file.open("rb") as opened:
            return opened.read(4) == b"GGUF"
    except OSError:
        return False


def _is_pointer(file: Path) -> bool:
    """True for the pointer that Git leaves in place of a large file if LFS did not run.

    Source: git-lfs, docs/spec.md (pointers are smaller than 1,024 bytes).
    """
    try:
        is_small = file.is_file() and file.stat().st_size < 1024
        return is_small and file.read_bytes().startswith(b"version https://git-lfs")
    except OSError:
        return False


def names_in_header(file: Path) -> frozenset[str]:
    """The names in a file's header for its model and base models, to compare with another
    file's."""
    header = _peeked(file)
    if header is None:
        return frozenset()
    names_found = [v for k, v in header[0].items() if _NAMES.fullmatch(k) and isinstance(v, str)]
    return frozenset(names.bare(name) for name in names_found) - {""}


def header_facts(file: Path) -> dict[str, Any]:
    """Facts from a GGUF header, or from a checkpoint folder's config.json, without reading weights.

    The keys are architecture, parameter_count, embedding_length and context_length. Unknown values
    are left out.
    """
    from localllm_catalog import gguf

    if file.is_dir():
        config = json_store.read(file / "config.json")
        named = {
            "model_type": "architecture",
            "hidden_size": "embedding_length",
            "max_position_embeddings": "context_length",
        }
        return {ours: config[theirs] for theirs, ours in named.items() if config.get(theirs)}
    try:
        header = gguf.read(file)
    except (CatalogError, OSError):
        return {}
    lengths = ("embedding_length", "context_length")
    found = {
        "architecture": header.architecture,
        "parameter_count": sum(tensor.n_elements for tensor in header.tensors),
        **{name: header.integer(f"{header.architecture}.{name}") for name in lengths},
    }
    return {name: value for name, value in found.items() if value}


def _peeked(file: Path) -> tuple[Mapping[str, Value], int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return _peek(file, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=4096)
def _peek(file: Path, _size_bytes: int, _changed_ns: int) -> tuple[Mapping[str, Value], int] | None:
    from localllm_catalog import gguf

    try:
        return gguf.peek(file)
    except (CatalogError, OSError):
        return None


def check_is_model(file: Path) -> None:
    """Raise ModelFileError if a GGUF file is no model.

    The error names the file's kind and a file to use instead.
    """
    from localllm_catalog import kinds

    kind = of_header(file)
    if file.name.startswith("._"):
        kind = "companion file"
    if kind is None or kind in kinds.MODELS:
        return
    kind_text, instead = kinds.WORDS[kind]
    kinds_here = of_files({f.name: f for f in file.parent.glob("*") if is_gguf(f.name)})
    other_models = sorted(
        name for name, (other, k) in kinds_here.items() if k in kinds.MODELS and other != file
    )
    hint = instead
    if other_models:
        hint += f"; models in its folder: {', '.join(other_models[:3])}"
    raise ModelFileError(f"{file.name} is {kind_text}, not a language model", hint=hint)
