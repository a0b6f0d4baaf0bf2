"""JSON files that we keep: read so that a missing or damaged one is none, written whole or not at
all, for their owner alone."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localllm import paths

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)

MOST_BYTES = 32 << 20
# What JSON must hold for a field so annotated; other fields (unions, literals) are taken as they
# are.
_JSON_OF: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "bool": bool, "float": (int, float), "dict[str, Any]": dict,
    "dict[str, float]": dict,
}  # fmt: skip


def parsed(text: str) -> Any:
    """What a text in JSON says; None where it says nothing, or is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def load(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """What a file of ordinary size holds. Raises OSError, and ValueError where it is too large or
    no JSON."""
    if path.stat().st_size > most_bytes:
        raise ValueError(f"it is larger than {most_bytes} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def read(path: Path) -> dict[str, Any]:
    """The object in a file; {} for a file that is not there, damaged, or of anything else."""
    try:
        value = load(path)
    except (OSError, ValueError):
        return {}
    if isinstance(value, dict):
        return value
    return {}


def record(kind: type[T], entry: Any) -> T | None:
    """`entry` as a dataclass, without what the dataclass doesn't know; None where it is no such
    thing."""
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
    """`value` as the whole of `path`, in a folder made for it. Raises OSError."""
    paths.private_dir(path.parent)
    paths.write_private(path, json.dumps(value, indent=1))


def keep(path: Path, value: Any) -> None:
    """`write`, where the disk takes it: what is kept so can be found out again."""
    with suppress(OSError):
        write(path, value)
