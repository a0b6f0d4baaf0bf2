"""How deep JSON text nests and how much it holds, told in one pass that never holds other threads up for long."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate

# Looked at in one go: a few milliseconds at most, after which another thread may run.
_SLICE_BYTES = 2**16
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def nests_deeper(body: bytes, levels: int, slice_bytes: int = _SLICE_BYTES) -> bool:
    """True when the JSON text `body` nests deeper than `levels`. Of text that is no JSON: at least when the part before
    its fault does."""
    depth = 0
    for brackets in _brackets(body, slice_bytes):
        depths = array("i", accumulate(array("b", brackets), initial=depth))
        if max(depths) > levels:
            return True
        depth = depths[-1]
    return False


def containers(body: bytes, slice_bytes: int = _SLICE_BYTES) -> int:
    """How many lists and objects are in the JSON text `body`."""
    return sum(brackets.count(b"\x01") for brackets in _brackets(body, slice_bytes))


def _brackets(body: bytes, slice_bytes: int) -> Iterator[bytes]:
    """The brackets outside strings, slice by slice: 1 for one that opens, 255 (-1) for one that closes."""
    if b"\\" in body:
        # What is escaped is no quote. A run of backslashes is taken from its left, in pairs, as JSON does.
        body = body.replace(rb"\\", b"").replace(rb"\"", b"")
    in_string = 0
    for start in range(0, len(body), slice_bytes):
        parts = body[start : start + slice_bytes].split(b'"')
        brackets = b"".join(parts[in_string::2]).translate(_STEPS, _NO_BRACKETS)
        in_string = (in_string + len(parts) - 1) % 2
        if brackets:
            yield brackets
