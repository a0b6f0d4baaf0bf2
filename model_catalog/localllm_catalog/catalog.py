"""Load the curated models: families/*.toml, with the user's own files on top."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from localllm_catalog.build import Sources, build_model, names_in
from localllm_catalog.errors import BadCatalogError
from localllm_catalog.names import bare
from localllm_catalog.types import Model

_HERE = Path(__file__).parent
FAMILIES_DIR = _HERE / "families"
SOURCES_FILE = _HERE / "sources.toml"
_MAX_FILE_BYTES = 32 << 20
Documents = dict[str, dict[str, Any]]


class Catalog:
    """All known models by id, in file order, including the user's own.

    A shipped model is built when it is first used, because building all of them takes as long as
    planning one.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], sources: Sources) -> None:
        self.by_id: Mapping[str, Model] = _LazyModels(tables, sources)
        self._tables = tables

    @property
    def models(self) -> tuple[Model, ...]:
        return tuple(self.by_id.values())

    def get(self, model_id: str) -> Model | None:
        """Return the model with this id, or None. Case is ignored, and a final "-instruct" or "-it"
        is optional."""
        lowered = model_id.lower()
        names = (lowered, f"{lowered}-instruct", f"{lowered}-it")
        for name in names:
            if name in self.by_id:
                return self.by_id[name]
        return None

    def recognise(self, *names: str) -> Model | None:
        """Return the model for one of these names: a repository, a file name, or a `general.name`.
        Returns None if it is not certain.

        Publishers' prefixes, quants, split numbers and endings are ignored; sizes and versions are
        not.
        """
        for name in names:
            model_id = self._ids_by_name.get(bare(name))
            if model_id is not None:
                return self.by_id[model_id]
        return None

    @cached_property
    def _ids_by_name(self) -> dict[str, str]:
        ids_by_name: dict[str, str] = {}
        for model_id, table in self._tables.items():
            for name in names_in(table):
                ids_by_name.setdefault(bare(name), model_id)
        ids_by_name.pop("", None)
        return ids_by_name

    def suggest(self, name: str, limit: int = 3) -> list[str]:
        """Return the ids that a user who typed `name` may have meant, best first; empty if no id is
        similar."""
        typed = name.lower().rpartition("/")[2]
        containing: list[str] = []
        if typed:
            containing = [
                model_id for model_id in self.by_id if typed in model_id or model_id in typed
            ]
            containing.sort(key=len)
        closest = difflib.get_close_matches(typed, self.by_id, n=limit, cutoff=0.55)
        return list(dict.fromkeys(containing + closest))[:limit]


class _LazyModels(Mapping[str, Model]):
    """Models by id. Raises BadCatalogError for a table that is not a model's."""

    def __init__(self, tables: Mapping[str, Mapping[str, Any]], sources: Sources) -> None:
        self._tables = tables
        self._sources = sources
        self._built: dict[str, Model] = {}

    def __getitem__(self, model_id: str) -> Model:
        if model_id not in self._built:
            self._built[model_id] = build_model(self._tables[model_id], self._sources)
        return self._built[model_id]

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def shipped_files() -> list[Path]:
    """Return the paths of the source table and of all family tables."""
    return [SOURCES_FILE, *sorted(FAMILIES_DIR.glob("*.toml"))]


def shipped() -> Documents:
    """Return the parsed shipped tables by file name. This takes 25 ms, so callers should cache
    it."""
    return {path.name: _parse(path) for path in shipped_files()}


def load(user_dir: Path | None = None, read: Callable[[], Documents] = shipped) -> Catalog:
    """Load the catalog with `user_dir`/*.toml on top: a known id changes that model's keys, a new
    id adds a model.

    `read` returns the same as `shipped`, for example from a cache. Raises BadCatalogError with
    file, model and key for anything invalid.
    """
    documents = read()
    sources = documents[SOURCES_FILE.name]
    tables_by_id: dict[str, dict[str, Any]] = {}
    for path in shipped_files()[1:]:
        for table in _models_of(documents[path.name], path):
            if table["id"] in tables_by_id:
                first_file = tables_by_id[table["id"]]["_file"]
                raise BadCatalogError(f"{path.name}: {table['id']} is already in {first_file}")
            tables_by_id[table["id"]] = table
    own_ids: list[str] = []
    user_files = []
    if user_dir is not None:
        user_files = _files_in(user_dir)
    for path in user_files:
        for table in read_family(path):
            _check_values(table, f"{path.name}: {table['id']}")
            tables_by_id[table["id"]] = _merged_table(tables_by_id.get(table["id"]), table)
            own_ids.append(table["id"])
    catalog = Catalog(tables_by_id, sources)
    # An error in a user's file is reported, whichever model is used.
    for model_id in own_ids:
        catalog.by_id[model_id]
    return catalog


def _files_in(folder: Path) -> list[Path]:
    """Return the *.toml files of the user's folder; empty if the folder does not exist."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadCatalogError(
            f"{folder} cannot be read: {error.strerror}", "check its permissions"
        ) from error


# Limits on the user's files. Text keys must be text. Numbers must not be negative, and those listed
# below must be at least one. None may exceed what real models have (gguf_facts.py applies the same
# limits to a header).
_TEXT = frozenset({
    "name", "hf_repo", "licence", "release_date", "architecture", "tokenizer", "tokenizer_pre",
    "notes", "params_note", "kind",
    "repo", "quant", "file", "mmproj", "source",
})  # fmt: skip
_POSITIVE_FIELDS = frozenset(
    {"params", "active", "layers", "hidden", "heads", "head_dim", "vocab", "context", "count"}
)
_MAX_LAYERS = 2_048
_MAX_COUNT = 1 << 50


def _check_values(table: Mapping[str, Any], where: str) -> None:
    for key, value in table.items():
        if key in _TEXT and not isinstance(value, str):
            raise BadCatalogError(f"{where}: {key} is {value!r}, not text")
        if isinstance(value, int | float) and not isinstance(value, bool):
            minimum = int(key in _POSITIVE_FIELDS)
            maximum = _MAX_LAYERS if key == "layers" else _MAX_COUNT
            if not minimum <= value <= maximum:
                raise BadCatalogError(
                    f"{where}: {key} is {value}, not a number from {minimum} to {maximum:,}"
                )
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if isinstance(part, Mapping):
                _check_values(part, f"{where}: {key}")


def read_sources() -> dict[str, dict[str, Any]]:
    return _parse(SOURCES_FILE)


def read_family(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the raw model tables of one family file, each with the file's [defaults]."""
    yield from _models_of(_parse(path), path)


def _models_of(document: Mapping[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    family = document.get("family", path.stem)
    defaults = document.get("defaults", {})
    tables = document.get("models")
    if not isinstance(tables, list) or not tables or not isinstance(defaults, dict):
        raise BadCatalogError(f"{path.name} has no [[models]]", "see the README in model_catalog/")
    for table in tables:
        if not isinstance(table, dict) or not isinstance(table.get("id"), str):
            raise BadCatalogError(f"{path.name}: a [[models]] table has no id")
        yield {"family": family, **defaults, **table, "id": table["id"].lower(), "_file": path.name}


def _parse(path: Path) -> dict[str, Any]:
    if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
        max_mib = _MAX_FILE_BYTES >> 20
        raise BadCatalogError(f"{path} is not a file of at most {max_mib} MiB", "remove it")
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCatalogError(f"{path} is not TOML: {error}") from error
    except RecursionError:
        raise BadCatalogError(
            f"{path} is not a catalog file: its values are nested too deeply"
        ) from None
    except OSError as error:
        raise BadCatalogError(
            f"{path} cannot be read: {error.strerror}", "check its permissions"
        ) from error


def _merged_table(base: dict[str, Any] | None, table: dict[str, Any]) -> dict[str, Any]:
    """Merge `table` over `base`. Sub-tables (sampling, experts, …) are merged key by key, lists are
    replaced."""
    if base is None:
        return table
    merged = dict(base)
    for key, value in table.items():
        if key == "family":
            continue
        base_value = merged.get(key)
        if isinstance(base_value, dict) and isinstance(value, dict):
            value = {**base_value, **value}
        merged[key] = value
    return merged
