"""config.toml's tables beside its settings, read by hand: every refusal names the table, and what
was meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.settings import config_path, read_config


def named_tables(name: str, each: str) -> Mapping[str, dict[str, Any]]:
    """The tables [`name`.NAME], one per `each`. Raises UsageError for anything else under that
    name."""
    tables = read_config().get(name, {})
    if not isinstance(tables, dict) or not all(
        isinstance(table, dict) for table in tables.values()
    ):
        raise UsageError(f"{config_path()}: `{name}` holds one table per {each}: [{name}.NAME]")
    return tables


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises UsageError for a key that is not `known`."""
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"{where} has an unknown key: {key}", hint=hint)


def text_of(table: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """The text `key`; without a `default` it must be there, and say something. Raises
    UsageError."""
    value = table.get(key, default)
    if not isinstance(value, str) or (not value and default is None):
        raise UsageError(f"{key} in {where} must be a text, not {value!r}")
    return value


def variable(name: str, where: str) -> str:
    """The key that the environment variable `name` holds. Raises UsageError where it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(
            f"{where} takes its key from {name}, which is not set", hint="export it first"
        )
    return value
