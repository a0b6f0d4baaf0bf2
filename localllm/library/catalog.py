"""Loads the catalog, reads model file headers, and converts the catalog package's errors."""

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
from localllm.library.cached_facts import CachedFacts, key_of
from localllm_catalog.errors import CatalogError

if TYPE_CHECKING:
    from localllm.library.types import LocalModel
    from localllm_catalog.byte_sources import OpenSource
    from localllm_catalog.catalog import Catalog, Documents
    from localllm_catalog.gguf import GgufHeader
    from localllm_catalog.types import Model

# The user's catalog file that `localllm catalog update` writes. Its first line has the date.
UPDATE_FILE = "00-hub-listings.toml"
# The date of the shipped catalog's newest source (model_catalog/localllm_catalog/sources.toml), and
# the age in days from which the listings count as old.
SHIPPED = datetime.date(2026, 11, 21)
OLD_DAYS = 60
# Kept because a vocabulary is an array of up to half a million strings of any length.
_STRING_ENDS = CachedFacts("string-arrays.json")
_DATED = re.compile(r"# Read from the hub on (\d{4}-\d\d-\d\d)")


def user_folder() -> Path:
    return paths.config_dir() / "models"


def age_days(folder: Path, today: datetime.date | None = None) -> int:
    """Days since the listings in use were read from the hub: the newer of the user's and the
    shipped."""
    read = SHIPPED
    try:
        dated = _DATED.match(paths.file_text(folder / UPDATE_FILE))
        if dated:
            read = max(read, datetime.date.fromisoformat(dated[1]))
    except (OSError, ValueError):
        pass
    return ((today or datetime.date.today()) - read).days


def load_catalog() -> Catalog:
    """The shipped models and the user's own. Parsed tables are kept in the cache folder.

    Raises CatalogFileError naming the file, the mistake in it and the remedy.
    """
    from localllm_catalog import catalog

    folder = user_folder()
    try:
        return catalog.load(folder, _shipped)
    except CatalogError as e:
        mend = (
            f"correct the file or move it out of {folder}; `python -m localllm_catalog.check "
            f"{folder}` lists all its errors"
        )
        raise CatalogFileError(e.message, hint=f"{e.hint}; {mend}" if e.hint else mend) from e


def _shipped() -> Documents:
    """The shipped tables, from the cache if path, size and time of their files are unchanged.

    Reading 125 kB from the cache takes 1 ms, parsing them 25 ms.
    """
    from localllm_catalog import catalog

    path = paths.cache_dir() / "catalog.json"
    documents: Documents = json_store.derived(path, catalog.shipped_files(), catalog.shipped)
    return documents


def read_header(source: Path | str, open_source: OpenSource | None = None) -> GgufHeader:
    """The header of a GGUF file on this disk, or of one that `open_source` reads.

    Raises ModelFileError with the reason if the header can't be read.
    """
    from localllm_catalog import gguf

    with _as_model_file(source):
        if open_source is not None:
            return gguf.read(source, open_source)
        known = _known_ends(Path(source))
        ends = dict(known)
        header = gguf.read(source, ends=ends)
        if ends != known:
            _STRING_ENDS.add({key_of(Path(source)): list(ends.items())})
        return header


def _known_ends(file: Path) -> dict[int, int]:
    """The ends of arrays of strings in a GGUF file by their starts; {} if they are unknown."""
    try:
        return {int(start): int(end) for start, end in _STRING_ENDS.facts()[key_of(file)]}
    except (KeyError, OSError, TypeError, ValueError):
        return {}


def readable_header(path: Path) -> GgufHeader | None:
    """The header of a GGUF file, or None if it can't be read (the engine reports the reason)."""
    try:
        return read_header(path)
    except ModelFileError:
        return None


def read_model(
    source: Path | str, *, known: Model | None = None, open_source: OpenSource | None = None
) -> Model:
    """The Model that a GGUF header or an MLX folder's config describes, with these files as its
    only Variant.

    `known` (the catalog's entry) supplies the facts that files do not contain. Raises
    ModelFileError.
    """
    from localllm_catalog import from_gguf

    if isinstance(source, Path) and source.is_dir():
        return _read_folder(source, known)
    with _as_model_file(source):
        return from_gguf.model_from_gguf(read_header(source, open_source), known=known)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """Model files on this disk, read once.

    `header` is that of a GGUF file. `model` is described by that header or by a config; its one
    Variant has the sizes of these files. Both are None if the files can't be read, and `fault` is
    the reason.
    """

    local: LocalModel
    header: GgufHeader | None = None
    model: Model | None = None
    fault: str = ""


def open_model(local: LocalModel, catalog: Catalog) -> OpenedModel:
    """Read the model's description from files on this disk, completed by the catalog."""
    from localllm_catalog import from_gguf

    known = catalog.recognise(local.name, local.path.name)
    header = None
    try:
        if local.path.is_dir():
            return OpenedModel(local, model=_read_folder(local.path, known))
        header = read_header(local.path)
        return OpenedModel(local, header, from_gguf.model_from_gguf(header, known=known))
    except (CatalogError, ModelFileError) as e:
        return OpenedModel(local, header, fault="" if header or local.is_folder else str(e))


def _read_folder(folder: Path, known: Model | None) -> Model:
    from localllm_catalog import from_hf

    with _as_model_file(folder):
        config = json_store.load(folder / "config.json")
        files = {
            name: (folder / name).stat().st_size for name in names.mlx_weights(os.listdir(folder))
        }
        # A model also runs without generation_config.json.
        stated = json_store.read(folder / "generation_config.json")
        return from_hf.model_from_config(config, files, known=known, generation=stated)


@contextmanager
def _as_model_file(source: Path | str) -> Iterator[None]:
    """Convert errors while reading `source` into ModelFileError."""
    try:
        yield
    except (CatalogError, OSError, ValueError) as e:
        name = str(source).rstrip("/").rpartition("/")[2]
        # Errors about damage carry their own hint. Any other error means an unknown layout.
        hint = getattr(e, "hint", "") or (
            "choose another file of the model: neither llama.cpp nor MLX can read this one"
        )
        reason = str(e).removeprefix(f"{source}: ")
        raise ModelFileError(f"{name} can't be read as a model: {reason}", hint=hint) from e
