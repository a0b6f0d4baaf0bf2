"""Limits of JSON that clients send: its number of values, before it is parsed, and its depth.

Clients send JSON as bodies, and as texts in bodies: the arguments of tool calls, and schemas. A
parsed list takes 20 times as many bytes as its text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from localllm.errors import RequestError

# A text is parsed and validated without interruption, so these limits bound the time. A body of
# 32 MiB could hold a hundred times as many. Real conversations with tools have thousands. A prompt
# of token ids has as many values as tokens.
_MAX_CONTAINERS = 50_000
_MAX_VALUES = 1_000_000
MAX_DEPTH = 96
# `_PLAIN` matches JSON text up to the next string. `_QUOTED` matches complete escapes and other
# characters up to the end of a string.
_PLAIN = re.compile(rb'[^"]*("?)')
_QUOTED = re.compile(rb'(?:[^"\\]+|\\.)*("?)', re.DOTALL)
# Longer pieces would block the event loop.
_PIECE_BYTES = 2**18


class TooManyContainersError(RequestError, code="too_many_lists"):
    """The texts hold too many lists and objects."""


class TooManyValuesError(RequestError, code="too_many_values"):
    """The texts hold too many values."""


class TooDeepError(RequestError, code="nested_too_deeply"):
    """A value nests too deeply."""


def check_counts(*texts: bytes | bytearray) -> int:
    """Return the number of opening brackets in `texts`, those in strings included.

    Raises TooManyContainersError and TooManyValuesError if all together hold too much. For these
    limits, brackets and commas inside strings don't count. Strings are parsed only if the simple
    count is over a limit."""
    brackets = sum(text.count(b"[") + text.count(b"{") for text in texts)
    commas = sum(text.count(b",") for text in texts)
    if brackets > _MAX_CONTAINERS or brackets + commas > _MAX_VALUES:
        counts = _Counts()
        for text in texts:
            counts.add(text)
    return brackets


def check_depth(value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Raise TooDeepError if `value` nests deeper than `max_depth` levels."""
    _check_levels(value, max_depth, max_depth)


def _check_levels(value: Any, levels: int, max_depth: int) -> None:
    if not isinstance(value, dict | list):
        return
    if not levels:
        raise TooDeepError(f"is nested deeper than {max_depth} levels")
    if isinstance(value, dict):
        value = value.values()
    for inner in value:
        _check_levels(inner, levels - 1, max_depth)


@dataclass
class _Counts:
    """The lists and objects, the values, and the strings of all texts."""

    containers: int = 0
    values: int = 0
    strings: int = 0

    def add(self, text: bytes | bytearray) -> None:
        quoted = False
        found = _PLAIN.match(text, 0, _PIECE_BYTES)
        # If no match is found, the text ends or is invalid. The JSON parser then reports the
        # position.
        while found is not None and found[0]:
            if not quoted:
                opened = found[0].count(b"[") + found[0].count(b"{")
                self.containers += opened
                self.values += opened + found[0].count(b",")
                self.strings += bool(found[1])
            if self.containers > _MAX_CONTAINERS:
                raise TooManyContainersError(f"more than {_MAX_CONTAINERS:,} lists and objects")
            # An object has two strings for each comma.
            if max(self.values, self.strings / 2) > _MAX_VALUES:
                raise TooManyValuesError(f"more than {_MAX_VALUES:,} values")
            quoted ^= bool(found[1])
            at = found.end()
            pattern = _QUOTED if quoted else _PLAIN
            found = pattern.match(text, at, at + _PIECE_BYTES)
