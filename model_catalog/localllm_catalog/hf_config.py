"""A Hugging Face config.json as untrusted input: bounded numbers, and its family's defaults for
missing values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm_catalog import config_defaults
from localllm_catalog.errors import BadHeaderError
from localllm_catalog.names import shown

_MAX_NUMBER = 1 << 40

MAMBAS = frozenset({"mamba", "falcon_mamba", "mamba2"})
# Model types without attention.
ALL_RECURRENT = MAMBAS | {"rwkv7"}


class Config:
    """Bounded look-ups in a config. Its text_config takes precedence."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        if isinstance(text, Mapping):
            self.text = text
        else:
            self.text = {}
        self.whole = config
        self.type = shown(str(self.text.get("model_type") or config.get("model_type") or ""))
        if self.text and not self.text.get("model_type"):
            self.type = config_defaults.wrapped(self.type)
        # A nested config only states values that differ from its family. A standalone one states
        # its shapes.
        defaults = config_defaults.of_type(self.type)
        nested = bool(self.text) or self.type in ALL_RECURRENT or self.type.startswith("gemma")
        self.defaults: Mapping[str, Any] = defaults if nested else {}

    def get(self, *names: str) -> Any:
        """Return the first of these values that exists and is not null, else the family's
        default."""
        for tables in ((self.text, self.whole), (self.defaults,)):
            for name in names:
                for table in tables:
                    if table.get(name) is not None:
                        return table[name]
        return None

    def number(self, *names: str, default: int | None = None) -> int:
        """Return a whole number from 0 to 2**40. Raises BadHeaderError if it is missing without a
        default, or out of bounds."""
        value = self.get(*names)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None:
            raise BadHeaderError(
                f"{names[0]} is missing, and the value that "
                f"{self.type or 'a model without a type'} uses as its default is unknown",
                "use a GGUF file of the model, or a repository with this value in config.json",
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:
            raise BadHeaderError(f"{names[0]} is {str(value)[:40]!r}, not a plain number")
        return value
