"""Parse server-sent events from language model servers: bytes to lines, lines to JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

DONE = "[DONE]"


class LineBuffer:
    """Splits bytes into lines at LF only.

    Other line readers also break at U+2028 and similar characters, which JSON may contain.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[str]:
        """Return the lines that `piece` completes."""
        self._buffer += piece
        *complete, rest = self._buffer.split(b"\n")
        self._buffer = rest
        return [_text(line) for line in complete]

    def end(self) -> list[str]:
        """Return the last line if it has no line ending."""
        if self._buffer:
            return [_text(self._buffer)]
        return []


def _text(line: bytearray) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def data_of(line: str) -> str | None:
    """Return the data of a line; None for comments, event names and empty lines."""
    if line.startswith("data:"):
        return line[5:].strip()
    return None


def objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a stream. Other data, such as `[DONE]`, is skipped."""
    for line in lines:
        data = data_of(line)
        if data is not None and data.startswith("{"):
            yield json.loads(data)
