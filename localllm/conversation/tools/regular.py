"""A client's Lark grammar as one regular expression, where no rule is recursive.

The text of a free-form call stands inside a call's JSON or tags, where the grammar of a whole
answer has no place; a regular expression has one, as the pattern of a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

_MAX_CHARS = 1 << 16
_TOKEN = re.compile(
    r"(?P<skip>[ "
    r'\t]+|//[^\n]*)|(?P<line>\n[\s]*)|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imsx]*)'
    r"|(?P<import>%import[ \t]+(?P<path>[\w.]+)(?:[ \t]*\((?P<names>[\w, \t]+)\))?(?:[ \t]*->[ "
    r"\t]*(?P<as>\w+))?)"
    r"|(?P<name>[?!]?[a-zA-Z_]\w*)(?P<head>(?:\.-?\d+)?[ \t]*:(?!:))?|(?P<alias>->[ \t]*\w+)"
    r"|(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)|(?P<mark>\.\.|[()\[\]|?*+])"
)
# What Lark's `common` names, as far as grammars of tools use it.
_COMMON: Mapping[str, str] = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]", "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)", "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?", "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}  # fmt: skip

# What stands for itself in a rule, and how its brackets are written.
_ITEMS = ("name", "text", "regex")
# A quantifier of a quantifier: to an expression it is another one.
_TWICE = re.compile(r"[?*+}][?*+{]")
_MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}
_Piece: TypeAlias = tuple[str, str]
"""A token's kind and its text."""


class _NotRegularError(Exception):
    """It needs more than a regular expression, or is written in a way that is not known here."""


def regular(lark: str) -> str | None:
    """The expression for the whole text that `lark` describes; None where it is not regular or
    can't be read."""
    try:
        rules, known = _rules(lark)
        return _Writer(rules, known).rule("start")
    except (_NotRegularError, ValueError, RecursionError, re.error):
        return None


def _tokens(lark: str) -> Iterator[tuple[str, re.Match[str]]]:
    at = 0
    while at < len(lark):
        match = _TOKEN.match(lark, at)
        if match is None:
            raise _NotRegularError
        at = match.end()
        kind = next(
            k
            for k in ("skip", "line", "text", "regex", "import", "name", "alias", "times", "mark")
            if match[k]
        )
        yield kind, match


def _rules(lark: str) -> tuple[dict[str, list[_Piece]], dict[str, str]]:
    """Each rule's pieces, and the imported names."""
    rules: dict[str, list[_Piece]] = {}
    known: dict[str, str] = {}
    current: list[_Piece] | None = None
    for kind, match in _tokens(lark):
        if kind == "import":
            known.update(_imported(match))
            current = None
        elif kind == "name" and match["head"]:
            current = rules.setdefault(match["name"].lstrip("?!"), [])
        elif kind in ("skip", "line", "alias"):
            continue
        elif current is None:
            raise _NotRegularError
        else:
            current.append((kind, match[kind]))
    return rules, known


def _imported(match: re.Match[str]) -> dict[str, str]:
    module, _, name = match["path"].partition(".")
    names = [n.strip() for n in match["names"].split(",")] if match["names"] else [name]
    if module != "common" or not all(n in _COMMON for n in names):
        raise _NotRegularError
    return {match["as"] or n: _COMMON[n] for n in names}


class _Writer:
    """Writes rules as expressions, each inside the one that names it."""

    def __init__(self, rules: Mapping[str, list[_Piece]], known: Mapping[str, str]) -> None:
        self._rules, self._done = rules, {name: f"(?:{e})" for name, e in known.items()}
        self._open: set[str] = set()

    def rule(self, name: str) -> str:
        """The expression of one rule; raises _NotRegularError."""
        if name in self._done:
            return self._done[name]
        if name in self._open or name not in self._rules:
            raise _NotRegularError
        self._open.add(name)
        pieces = [(kind, self._piece(kind, said)) for kind, said in self._rules[name]]
        # Brackets and quantifiers are an expression's own, where they stand as one wants them.
        frame = "".join("x" if kind in _ITEMS else said for kind, said in pieces)
        re.compile(frame)
        if _TWICE.search(frame):
            raise _NotRegularError
        written = f"(?:{''.join(said for _, said in pieces)})"
        if len(written) > _MAX_CHARS:
            raise _NotRegularError
        self._open.discard(name)
        self._done[name] = written
        return written

    def _piece(self, kind: str, said: str) -> str:
        if kind == "name":
            return self.rule(said)
        if kind == "text":
            literal = "".join(map(_escaped, json.loads(said.removesuffix("i"))))
            return f"(?i:{literal})" if said.endswith("i") else f"(?:{literal})"
        if kind == "regex":
            inner, _, flags = said[1:].rpartition("/")
            return f"(?{flags}:{inner})"
        if kind == "times":
            return "{" + re.sub(r"[~\s]", "", said).replace("..", ",") + "}"
        if said == "..":
            raise _NotRegularError
        return _MARKS.get(said, said)


def _escaped(char: str) -> str:
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    return "\\" + char if char in r"\.+*?()|[]{}^$#&-~/" else char
