"""Converts a client's Lark grammar into one regular expression if no rule is recursive.

The text of a free-form call is inside a call's JSON or tags, where a grammar can't be embedded. A
regular expression can, as the pattern of a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from localllm.grammars.expressions import Expressions, Piece

_TOKEN = re.compile(
    r"(?P<skip>[ \t]+|//[^\n]*)|(?P<line>\n[\s]*)"
    r'|(?P<text>"(?:[^"\\\n]|\\.)*"i?)|(?P<regex>/(?:[^/\\\n]|\\.)+/[imsx]*)'
    r"|(?P<import>%import[ \t]+(?P<path>[\w.]+)"
    r"(?:[ \t]*\((?P<names>[\w, \t]+)\))?(?:[ \t]*->[ \t]*(?P<as>\w+))?)"
    r"|(?P<name>[?!]?[a-zA-Z_]\w*)(?P<head>(?:\.-?\d+)?[ \t]*:(?!:))?|(?P<alias>->[ \t]*\w+)"
    r"|(?P<times>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)|(?P<mark>\.\.|[()\[\]|?*+])"
)
# The terminals of Lark's `common` module that tool grammars use.
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

# A quantifier of a quantifier has another meaning in a regular expression.
_DOUBLE_QUANTIFIER = re.compile(r"[?*+}][?*+{]")
_GROUP_MARKS = {"(": "(?:", "[": "(?:", "]": ")?"}


def regular(lark: str) -> str | None:
    """The expression for the text that `lark` describes, or None if it is not regular or
    unreadable."""
    try:
        return Expressions(_rules(lark)).rule("start")
    except (ValueError, KeyError, RecursionError, re.error):
        return None


def _rules(lark: str) -> dict[str, list[Piece]]:
    """The pieces of each rule. Raises ValueError, KeyError and re.error for unsupported syntax."""
    rules: dict[str, list[Piece]] = {}
    current: list[Piece] | None = None
    position = 0
    while position < len(lark):
        match = _TOKEN.match(lark, position)
        if match is None:
            raise ValueError(f"this can't be parsed: {lark[position : position + 20]!r}")
        position = match.end()
        if match["import"]:
            rules |= _imported(match)
            current = None
        elif match["head"]:
            current = rules.setdefault(match["name"].lstrip("?!"), [])
        elif not (match["skip"] or match["line"] or match["alias"]):
            if current is None:
                raise ValueError("there is no rule before this")
            current.append(_piece(match))
    for pieces in rules.values():
        # Brackets and quantifiers are copied to the expression, so they must be valid there.
        frame = "".join(token if kind == "mark" else "x" for kind, token in pieces)
        re.compile(frame)
        if _DOUBLE_QUANTIFIER.search(frame):
            raise ValueError("repeated twice")
    return rules


def _imported(match: re.Match[str]) -> dict[str, list[Piece]]:
    module, _, name = match["path"].partition(".")
    names = [name]
    if match["names"]:
        names = [imported_name.strip() for imported_name in match["names"].split(",")]
    if module != "common":
        raise ValueError("only names of Lark's `common` can be imported")
    return {
        match["as"] or imported_name: [("item", _COMMON[imported_name])] for imported_name in names
    }


def _piece(match: re.Match[str]) -> Piece:
    token = match[0]
    if match["name"]:
        return "rule", token
    if match["text"]:
        literal = "".join(_escaped(char) for char in json.loads(token.removesuffix("i")))
        flags = "i" if token.endswith("i") else ""
        return "item", f"(?{flags}:{literal})"
    if match["regex"]:
        inner, _, flags = token[1:].rpartition("/")
        return "item", f"(?{flags}:{inner})"
    if match["times"]:
        return "mark", "{" + re.sub(r"[~\s]", "", token).replace("..", ",") + "}"
    if token == "..":
        raise ValueError("ranges of letters are not supported")
    return "mark", _GROUP_MARKS.get(token, token)


def _escaped(char: str) -> str:
    if char in "\n\r\t":
        return {"\n": r"\n", "\r": r"\r", "\t": r"\t"}[char]
    if char in r"\.+*?()|[]{}^$#&-~/":
        return "\\" + char
    return char
