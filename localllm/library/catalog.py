"""Loads the catalog and reads the headers of model files; the catalog package's errors become
ours."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localllm import json_store, paths
from localllm.errors import CatalogFileError, ModelFileError
from localllm.library import names
from localllm_catalog.errors import CatalogError

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm_catalog.byte_sources import OpenSource
    from localllm_catalog.catalog import Catalog, Documents
    from localllm_catalog.gguf import GgufHeader
    from localllm_catalog.types import Model

# Of the user's catalog files the one that `localllm catalog update` writes; its first line says
# when.
UPDATE_FILE = "00-hub-listings.toml"
# The newest source of the shipped catalog (model_catalog/localllm_catalog/sources.toml), and when
# to say that it is old.
SHIPPED = datetime.date(2026, 11, 21)
OLD_DAYS = 60
_DATED = re.compile(r"# Read from the hub on (\d{4}-\d\d-\d\d)")


def user_folder() -> Path:
    return paths.config_dir() / "models"


def age_days(folder: Path, today: datetime.date | None = None) -> int:
    """Days since the listings in use were read: the user's update, else those shipped."""
    read = SHIPPED
    try:
        with (folder / UPDATE_FILE).open(encoding="utf-8") as file:
            dated = _DATED.match(file.readline())
        if dated:
            read = max(read, datetime.date.fromisoformat(dated[1]))
    except (OSError, ValueError):
        pass
    return ((today or datetime.date.today()) - read).days


def load_catalog() -> Catalog:
    """The shipped models and the user's own; what was parsed is kept in the cache folder.

    Raises CatalogFileError naming the file, what is wrong in it and what to do.
    """
    from localllm_catalog import catalog

    folder = user_folder()
    try:
        return catalog.load(folder, _shipped)
    except CatalogError as e:
        mend = (
            f"mend the file or move it out of {folder}; `python -m localllm_catalog.check "
            f"{folder}` lists every mistake"
        )
        raise CatalogFileError(e.message, hint=f"{e.hint}; {mend}" if e.hint else mend) from e


def _shipped() -> Documents:
    """The shipped tables as they were parsed before, for as long as path, size and time of their
    files are the same: 125 kB read in 1 ms instead of parsed in 25."""
    from localllm_catalog import catalog

    files = [(file, file.stat()) for file in catalog.shipped_files()]
    stamp = [[str(file), found.st_size, found.st_mtime_ns] for file, found in files]
    path = paths.cache_dir() / "catalog.json"
    kept = json_store.read(path)
    if kept.get("stamp") != stamp:
        kept = {"stamp": stamp, "documents": catalog.shipped()}
        json_store.keep(path, kept)
    documents: Documents = kept["documents"]
    return documents


def read_header(source: Path | str, open_source: OpenSource | None = None) -> GgufHeader:
    """The header of a GGUF file on this disk, or of one that `open_source` reads.

    Raises ModelFileError saying what is wrong with it.
    """
    from localllm_catalog import gguf

    with _as_model_file(source):
        return gguf.read(source, open_source)


def readable_header(path: Path) -> GgufHeader | None:
    """The header of a GGUF file; None where it can't be read (the engine says what is wrong)."""
    try:
        return read_header(path)
    except ModelFileError:
        return None


def read_model(
    source: Path | str, *, known: Model | None = None, open_source: OpenSource | None = None
) -> Model:
    """The Model that a GGUF file's header or an MLX folder's config describes, with one Variant:
    these files.

    `known` (the catalog's entry) lends what files cannot say. Raises ModelFileError.
    """
    from localllm_catalog import from_gguf

    if isinstance(source, Path) and source.is_dir():
        return _read_folder(source, known)
    with _as_model_file(source):
        return from_gguf.model_from_gguf(read_header(source, open_source), known=known)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Files on this disk, read once: a GGUF file's `header`, and the `model` that header or config
    describes, with one Variant whose bytes are the files' own. None where they can't be read so:
    the engine says what is wrong with them."""

    local: LocalModel
    header: GgufHeader | None = None
    model: Model | None = None


def open_model(local: LocalModel, catalog: Catalog) -> OpenedModel:
    """Read what files on this disk say of their model; the catalog lends what they cannot say."""
    from localllm_catalog import from_gguf

    known = catalog.recognise(local.name, local.path.name)
    header = None
    try:
        if local.path.is_dir():
            return OpenedModel(local, model=_read_folder(local.path, known))
        header = read_header(local.path)
        return OpenedModel(local, header, from_gguf.model_from_gguf(header, known=known))
    except (CatalogError, ModelFileError):
        return OpenedModel(local, header)


def _read_folder(folder: Path, known: Model | None) -> Model:
    import json

    from localllm_catalog import from_hf

    with _as_model_file(folder):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
        files = {
            name: (folder / name).stat().st_size for name in names.mlx_weights(os.listdir(folder))
        }
        # A model runs without the one of generation, too.
        stated = json_store.read(folder / "generation_config.json")
        return from_hf.model_from_config(config, files, known=known, generation=stated)


@contextmanager
def _as_model_file(source: Path | str) -> Iterator[None]:
    """What can't be read of `source` is a ModelFileError."""
    try:
        yield
    except (CatalogError, OSError, ValueError) as e:
        name = str(source).rstrip("/").rpartition("/")[2]
        # Damage is named by whoever finds it; what is left is written otherwise than we read it.
        hint = getattr(e, "hint", "") or (
            "take another file of the model: this one is not written as llama.cpp's or MLX's are"
        )
        raise ModelFileError(f"{name} can't be read as a model: {e}", hint=hint) from e
