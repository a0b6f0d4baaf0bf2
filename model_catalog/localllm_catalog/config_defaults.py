"""The values that a config.json omits because its family implies them.

A nested text_config only holds values that differ from these (config_defaults.toml).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".toml")


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def wrapped(model_type: str) -> str:
    """Return the language model's type in a type that wraps it without stating it ("llava":
    "llama")."""
    return str(_tables()["wraps"].get(model_type, model_type))


@cache
def of_type(model_type: str) -> Mapping[str, Any]:
    """Return the values that a config of this type implies; {} for an unknown type."""
    values = dict(_tables()["types"].get(wrapped(model_type), {}))
    parent = values.pop("like", None)
    if parent is None:
        return values
    return {**of_type(parent), **values}
