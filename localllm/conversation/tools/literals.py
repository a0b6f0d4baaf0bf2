"""Recursive-descent reader of nested values in formats close to JSON.

A format defines how its scalars and keys look.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

_SPACE = re.compile(r"\s*")
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|inf|nan)(?![\w.])")
_QUOTED = re.compile(r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|U(00[01][0-9a-fA-F]{5})|x([0-9a-fA-F]{2})|.)", re.DOTALL
)
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_WORD = re.compile(r"(?:true|True|false|False|null|None)(?!\w)")
_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"',
    "\n": "",
}  # fmt: skip


class LiteralReader:
    """Reads values written as Python literals, as JSON, or as a mixture of both."""

    lists: ClassVar[Mapping[str, str]] = {"[": "]", "(": ")"}

    def value(self, text: str, at: int) -> tuple[object, int]:
        """The value at `at` and the index of its end.

        Raises ValueError if there is no value, or RecursionError.
        """
        at = _after_space(text, at)
        opened = text[at : at + 1]
        if opened == "{":
            return self._members(text, at + 1)
        if opened in self.lists:
            return self._items(text, at + 1, self.lists[opened])
        return self.scalar(text, at)

    def scalar(self, text: str, at: int) -> tuple[object, int]:
        """The text, number, boolean or null at `at`."""
        if text[at : at + 1] in ("'", '"'):
            return _text(text, at)
        if word := _WORD.match(text, at):
            return _WORDS[word[0]], word.end()
        if number := _NUMBER.match(text, at):
            if number[0].lstrip("-").isdigit():
                return json.loads(number[0]), number.end()
            return float(number[0]), number.end()
        raise ValueError(f"there is no value: {text[at : at + 20]!r}")

    def key(self, text: str, at: int) -> tuple[str, int]:
        """The key at `at`. JSON keys are texts, Python keys may be numbers."""
        key, at = self.value(text, at)
        if not isinstance(key, str):
            key = json.dumps(key)
        return key, at

    def _items(self, text: str, at: int, closing: str) -> tuple[list[object], int]:
        items: list[object] = []
        at = _after_space(text, at)
        while not text.startswith(closing, at):
            item, at = self.value(text, at)
            items.append(item)
            at = _after_comma(text, at, closing)
        return items, at + 1

    def _members(self, text: str, at: int) -> tuple[dict[str, object], int]:
        members: dict[str, object] = {}
        at = _after_space(text, at)
        while not text.startswith("}", at):
            key, at = self.key(text, at)
            at = _after_space(text, at)
            if not text.startswith(":", at):
                raise ValueError("a key without a value")
            members[key], at = self.value(text, at + 1)
            at = _after_comma(text, at, "}")
        return members, at + 1


def literal(text: str) -> object:
    """The single value in `text`. Raises ValueError, or RecursionError."""
    value, at = LiteralReader().value(text, 0)
    if _after_space(text, at) != len(text):
        raise ValueError(f"more than one value: {text[at : at + 20]!r}")
    return value


def _text(text: str, at: int) -> tuple[str, int]:
    quoted = _QUOTED.match(text, at)
    if quoted is None:
        raise ValueError("a text has no closing quote")
    text = _ESCAPE.sub(_unescaped, quoted[1] or quoted[2] or "")
    try:  # join the two surrogates of a character beyond the basic plane
        return text.encode("utf-16", "surrogatepass").decode("utf-16"), quoted.end()
    except UnicodeDecodeError:
        return text, quoted.end()


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        return chr(int(code, 16))
    return _LETTERS.get(match[0][1:], match[0])


def _after_comma(text: str, at: int, closing: str) -> int:
    at = _after_space(text, at)
    if text.startswith(",", at):
        return _after_space(text, at + 1)
    if not text.startswith(closing, at):
        raise ValueError("a list has no closing bracket")
    return at


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    if match is not None:
        return match.end()
    return at
