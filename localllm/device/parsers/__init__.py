"""Parse the output of system files and tools into facts. Parsers do no I/O.

The functions here extract numbers from text. They return the value or None, and never raise.
"""

from __future__ import annotations

import json
import re
from typing import Any

# More digits than any real figure. Longer numbers are garbage, and int() of a million digits is
# slow.
_MAX_DIGITS = 20


def integer(text: str | None) -> int | None:
    """Return the leading decimal integer of `text` ("4294967296\\n", "16 GiB" → 16), or None."""
    match = re.match(r"\s*(-?[0-9]+)", text or "")
    if match and len(match.group(1)) <= _MAX_DIGITS:
        return int(match.group(1))
    return None


def hexadecimal(text: str | None) -> int | None:
    """Return a hexadecimal integer with or without 0x, or None."""
    match = re.match(r"\s*(?:0x)?([0-9a-fA-F]+)\s*$", text or "")
    if match and len(match.group(1)) <= _MAX_DIGITS:
        return int(match.group(1), 16)
    return None


def decimal(text: str | None) -> float | None:
    """Return the leading decimal number of `text` ("1792.5 GB/s" → 1792.5), or None."""
    match = re.match(r"\s*(-?[0-9]+(?:\.[0-9]+)?)", text or "")
    if match and len(match.group(1)) <= _MAX_DIGITS:
        return float(match.group(1))
    return None


def from_json(text: str) -> Any:
    """Parse a program's JSON output. Returns None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def key_values(text: str, separator: str = ":") -> dict[str, str]:
    """Parse lines of "key: value" into a dict. The first value of a repeated key wins."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, sep, value = line.partition(separator)
        if sep:
            values.setdefault(key.strip(), value.strip())
    return values
