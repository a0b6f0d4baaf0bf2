"""Lines that agents change with every request and that would keep any prefix from being reused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# Claude Code puts its billing header, with a fresh checksum each time, first into the system prompt:
# https://github.com/ollama/ollama/pull/14918, https://github.com/bman654/clodex/pull/93
_VOLATILE = (("billing-header", re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE | re.IGNORECASE)),)


def without_volatile(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The messages with such lines taken out of system texts, and the names of what was taken."""
    found: list[str] = []
    cleaned: list[dict[str, Any]] = []
    for message in messages:
        plain = dict(message)
        if plain["role"] == "system":
            for name, pattern in _VOLATILE:
                text, count = pattern.subn("", plain["content"])
                if count:
                    plain["content"] = text
                    found.append(name)
        cleaned.append(plain)
    return cleaned, tuple(dict.fromkeys(found))
