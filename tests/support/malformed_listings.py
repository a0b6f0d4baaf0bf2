"""Malformed listings of models or files: each one is small to send or large to read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from support.examples import NEW

# The largest number of bytes of memory that reading a listing may take.
MOST_BYTES = 64 << 20
_VALUES: Mapping[str, str] = {
    "number": "5", "negative": "-1", "1e999": "1e999", "NaN": "NaN", "long number": "1" * 5000,
    "true": "true", "text": '"x"', "half": r'"\ud83d"', "null": "null", "list": "[1]",
    "object": '{"a": [1]}', "nested": "[" * 500 + "]" * 500,
}  # fmt: skip
_WHOLE: Mapping[str, Callable[[], bytes]] = {
    "nothing": lambda: b"", "web page": lambda: b"<html>hello", "half": lambda: b'{"data": [{"id',
    "bad UTF-8": lambda: b'{"data": "\xff"}', "text": lambda: b"hello",
    "200,000 brackets": lambda: b"[" * 200_000 + b"]" * 200_000,
    "500,000 brackets": lambda: b"[" * 500_000,
    "empty lists": lambda: b"[" + b"[]," * 2_000_000 + b"0]",
    "numbers": lambda: b"[" + b"1," * 3_000_000 + b"0]",
    "members": lambda: ("{" + ",".join(f'"{n}":{n}' for n in range(400_000)) + "}").encode(),
    "long text": lambda: b'{"data": "' + b"a" * (200 << 20) + b'"}',
    "white space": lambda: b" " * (100 << 20) + b"{}",
}  # fmt: skip
_MARK = "\N{REPLACEMENT CHARACTER}value"


def listings(places: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the name of each listing, and a function that makes it. `places` are documents in which
    `mark()` stands for a malformed value. The long lane uses all of them, other runs each 7th."""
    yield from _WHOLE.items()
    made = []
    for place, document in places.items():
        for name, value in _VALUES.items():
            text = json.dumps(document).replace(json.dumps(_MARK), value)
            made.append((f"{place}: {name}", text.encode))
    yield from made[:: 1 if NEW else 7]


def mark() -> str:
    """Return the placeholder of a malformed value."""
    return _MARK


def bomb() -> bytes:
    """Return 32 MB that are sent as 150 kB."""
    return gzip.compress(b'{"data": "' + b"a" * (32 << 20) + b'"}', 1)
