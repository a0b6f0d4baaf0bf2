"""Read tables of config.toml. Each error names the table, and suggests a correction."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from localllm.errors import UsageError
from localllm.settings import config_path, read_config


def named_tables(name: str, entry_kind: str) -> Mapping[str, dict[str, Any]]:
    """Return the tables [`name`.NAME], one per `entry_kind`.

    Raises UsageError if there are other values under that name.
    """
    tables = read_config().get(name, {})
    if not isinstance(tables, dict) or not all(
        isinstance(table, dict) for table in tables.values()
    ):
        raise UsageError(
            f"{config_path()}: `{name}` must have one table per {entry_kind}: [{name}.NAME]"
        )
    return tables


def read_table(table: Mapping[str, Any], where: str, **known: Any) -> dict[str, Any]:
    """Return the values of all `known` keys. Each is given as for pydantic: (type, default).

    Raises UsageError for an unknown key or a value of another type. The error never contains the
    value, because it may be a secret.
    """
    from pydantic import ConfigDict, ValidationError, create_model

    from localllm.server.dialects.known import problem_of

    for key in table:
        if key not in known:
            closest = difflib.get_close_matches(key, known, n=1)
            hint = f"known: {', '.join(known)}"
            if closest:
                hint = f"did you mean {closest[0]}?"
            raise UsageError(f"{where} has an unknown key: {key}", hint=hint)
    table_type = create_model("Table", __config__=ConfigDict(strict=True), **known)
    try:
        return dict(table_type.model_validate(table))
    except ValidationError as e:
        errors = e.errors(include_url=False, include_input=False)
        first_key = errors[0]["loc"][0]
        problem = problem_of(error for error in errors if error["loc"][0] == first_key)
        raise UsageError(f"{first_key} in {where} {problem}") from None


def variable(name: str, where: str) -> str:
    """Return the key from the environment variable `name`. Raises UsageError if it is not set."""
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(
            f"{where} reads its key from the variable {name}, which is not set",
            hint="export the variable first",
        )
    return value
