"""The memory that the texts of a JSON body take once it is parsed.

Python stores each character of a text in as many bytes as the text's widest character needs: 1, 2 or
4. So 31 MB of English with one emoji take 124 MB."""

from __future__ import annotations

import re
from collections.abc import Iterator

# One call of `re` or `bytes` blocks the event loop for this many bytes at most.
_PIECE_BYTES = 2**18
# A character's escape that begins at the end of a piece is read with that piece.
_ESCAPE_BYTES = 4
# A quote that may begin or end a text. Some quotes after a backslash do, too. Overlooking those makes
# the result larger at most.
_QUOTE = re.compile(rb'"(?<!\\")')
_TO_LAST_QUOTE = re.compile(rb'.+"(?<!\\")', re.DOTALL)
_CONTINUATION = bytes(range(0x80, 0xC0))
# The first bytes of characters above U+FFFF and above U+00FF, in UTF-8.
_FOUR_BYTES = bytes(range(0xF0, 0x100))
_TWO_BYTES = bytes(range(0xC4, 0x100))
_SURROGATE = re.compile(rb"\\u[dD][89abAB]")


def text_bytes(body: bytes | bytearray) -> int:
    """Return how many bytes the texts in `body` take at most."""
    if 0 in body[:4]:  # UTF-16 or UTF-32
        return 2 * len(body)
    # A search for one byte takes a tenth of the time of a search for two.
    if body.isascii() and (b"\\" not in body or b"\\u" not in body):
        return len(body)
    return sum(_part_bytes(body, start, end) for start, end in _parts(body))


def _parts(body: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """The ranges of short parts that end at a quote. A longer text is a part by itself."""
    start = 0
    while start < len(body):
        stop = start + _PIECE_BYTES
        found = _TO_LAST_QUOTE.match(body, start, stop)
        while found is None and stop < len(body):
            found = _QUOTE.search(body, stop, stop + _PIECE_BYTES)
            stop += _PIECE_BYTES
        end = len(body)
        if found is not None:
            end = found.end()
        yield start, end
        start = end


def _part_bytes(body: bytes | bytearray, start: int, end: int) -> int:
    n_chars = 0
    width = 1
    for at in range(start, end, _PIECE_BYTES):
        piece = body[at : min(at + _PIECE_BYTES + _ESCAPE_BYTES, end)]
        n_chars += len(piece)
        if not piece.isascii():
            n_chars -= _count(piece, _CONTINUATION)
            width = max(width, _width(piece))
        if b"\\u" in piece:
            width = max(width, 4 if _SURROGATE.search(piece) else 2)
    return n_chars * width


def _width(piece: bytes | bytearray) -> int:
    """The bytes that each character of a text with the bytes of `piece` takes."""
    if _count(piece, _FOUR_BYTES):
        return 4
    if _count(piece, _TWO_BYTES):
        return 2
    return 1


def _count(piece: bytes | bytearray, kinds: bytes) -> int:
    return len(piece) - len(piece.translate(None, kinds))
