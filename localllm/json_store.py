"""JSON files that localllm keeps.

A missing or damaged file reads as empty. Writes are atomic, and only the owner can read the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localllm import __version__, paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MAX_BYTES = paths.MAX_FILE_BYTES
# JSON types that a field with this annotation accepts. Other fields (unions, literals) are not
# checked.
_JSON_OF: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "bool": bool, "float": (int, float), "dict[str, Any]": dict,
    "dict[str, float]": dict,
}  # fmt: skip


def parsed(text: str) -> Any:
    """Parse JSON text. Returns None if it is invalid (or is `null`)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def load(path: Path, most_bytes: int = MAX_BYTES) -> Any:
    """Parse a JSON file. Raises OSError as `paths.file_bytes` does, or ValueError if it is
    invalid."""
    try:
        return json.loads(paths.file_text(path, most_bytes, "utf-8-sig"))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def read(path: Path) -> dict[str, Any]:
    """Return the object in a file, or {} if the file is missing, damaged or holds no object."""
    try:
        value = load(path)
    except (OSError, ValueError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def entries(path: Path, name: str) -> list[Any]:
    """Return the list of that name in a file's object, or [] if there is no list."""
    found = read(path).get(name)
    if isinstance(found, list):
        return found
    return []


def record(kind: type[T], entry: Any) -> T | None:
    """Build the dataclass `kind` from `entry`, ignoring unknown fields. Returns None if a field has
    the wrong type or is missing."""
    if not isinstance(entry, dict):
        return None
    known = {}
    for field in fields(kind):
        if field.name in entry:
            value = entry[field.name]
            if not isinstance(value, _JSON_OF.get(str(field.type), object)):
                return None
            known[field.name] = tuple(value) if isinstance(value, list) else value
    try:
        return kind(**known)
    except (TypeError, ValueError):
        return None


def write(path: Path, value: Any) -> None:
    """Replace the file `path` with `value` as JSON, and create its folder. Raises OSError."""
    paths.private_dir(path.parent)
    paths.write_private(path, json.dumps(value, indent=1))


def keep(path: Path, value: Any) -> None:
    """Write `value`, but ignore disk errors, because the value can be computed again."""
    with suppress(OSError):
        write(path, value)


def derived(path: Path, sources: Iterable[Path], make: Callable[[], Any]) -> Any:
    """Return the JSON value that `make` computes from the files `sources`, kept in the file `path`.

    It is computed again if path, size or time of a source has changed, or the program's version.
    Code that computes it is a source too.
    """
    stamp: list[Any] = [__version__]
    for file in sources:
        found = file.stat()
        stamp.append([str(file), found.st_size, found.st_mtime_ns])
    cached = read(path)
    if cached.get("stamp") != stamp or "value" not in cached:
        cached = {"stamp": stamp, "value": make()}
        keep(path, cached)
    return cached["value"]
