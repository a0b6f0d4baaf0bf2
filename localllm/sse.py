"""Server-sent events as language models' servers send them: pieces of bytes into lines, lines into
JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

DONE = "[DONE]"


class LineBuffer:
    """Lines out of pieces, ended by LF only: other readers also break at U+2028 and others, which
    JSON may hold."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[str]:
        """The lines that `piece` completes."""
        self._buffer += piece
        *complete, rest = self._buffer.split(b"\n")
        self._buffer = rest
        return [_text(line) for line in complete]

    def end(self) -> list[str]:
        """The last line, where nothing ended it."""
        if self._buffer:
            return [_text(self._buffer)]
        return []


def _text(line: bytearray) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def data_of(line: str) -> str | None:
    """What a line says as data; None for comments, names of events and empty lines."""
    if line.startswith("data:"):
        return line[5:].strip()
    return None


def objects(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream; other data, such as `[DONE]`, is left out."""
    for line in lines:
        data = data_of(line)
        if data is not None and data.startswith("{"):
            yield json.loads(data)
