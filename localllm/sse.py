"""Parse server-sent events from language model servers: bytes to lines, lines to JSON objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from localllm import foreign_json

DONE = "[DONE]"


class LineBuffer:
    """Splits bytes into lines at LF only.

    Other line readers also break at U+2028 and similar characters, which JSON may contain.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[str]:
        """Return the lines that `piece` completes. Raises MalformedError for an endless line."""
        end = piece.find(b"\n")
        if end < 0:  # a long line: looking at its beginning again would take quadratic time
            self._buffer += piece
            foreign_json.check_size(self._buffer)
            return []
        first, *complete, rest = (bytes(self._buffer) + piece).split(b"\n")
        self._buffer = bytearray(rest)
        return [_text(line) for line in (first, *complete)]

    def end(self) -> list[str]:
        """Return the last line if it has no line ending."""
        if self._buffer:
            return [_text(self._buffer)]
        return []


def _text(line: bytes | bytearray) -> str:
    return line.removesuffix(b"\r").decode("utf-8", "replace")


def data_of(line: str) -> str | None:
    """Return the data of a line; None for comments, event names and empty lines."""
    if line.startswith("data:"):
        return line[5:].strip()
    return None


def objects(lines: Iterable[str]) -> Iterator[foreign_json.JsonPart]:
    """Yield the JSON objects of a stream. Other data, such as `[DONE]`, is skipped. Raises
    MalformedError."""
    for line in lines:
        data = data_of(line)
        if data is not None and data.startswith("{"):
            yield foreign_json.parse(data)
