"""From what the system's files and tools printed to facts: pure. Here, numbers out of text: the
value, or None, never an exception."""

from __future__ import annotations

import json
import re
from typing import Any

# Longer than any real figure; a number beyond this is garbage (and int() of a million digits is
# slow).
_MAX_DIGITS = 20


def integer(text: str | None) -> int | None:
    """The leading decimal integer of `text` ("4294967296\\n", "16 GiB" → 16), or None."""
    found = re.match(r"\s*(-?[0-9]+)", text or "")
    if found and len(found.group(1)) <= _MAX_DIGITS:
        return int(found.group(1))
    return None


def hexadecimal(text: str | None) -> int | None:
    """A hexadecimal integer with or without 0x, or None."""
    found = re.match(r"\s*(?:0x)?([0-9a-fA-F]+)\s*$", text or "")
    if found and len(found.group(1)) <= _MAX_DIGITS:
        return int(found.group(1), 16)
    return None


def decimal(text: str | None) -> float | None:
    """The leading decimal number of `text` ("1792.5 GB/s" → 1792.5), or None."""
    found = re.match(r"\s*(-?[0-9]+(?:\.[0-9]+)?)", text or "")
    if found and len(found.group(1)) <= _MAX_DIGITS:
        return float(found.group(1))
    return None


def from_json(text: str) -> Any:
    """What a program printed as JSON; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def key_values(text: str, separator: str = ":") -> dict[str, str]:
    """Lines of "key: value" as a dict; the first of a repeated key wins."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, sep, value = line.partition(separator)
        if sep:
            found.setdefault(key.strip(), value.strip())
    return found
