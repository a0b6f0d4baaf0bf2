"""Converts one schema to llguidance's form, keyword by keyword."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from localllm.grammars.formats import EXPRESSIONS, FORMATS

# llguidance crashes on bounds beyond 64 bits.
_LARGEST = 4_000_000_000_000_000_000
# llguidance stores constants as 64-bit floats, so a larger integer would be changed.
_EXACT = 2**53
# Each remainder is a state of llguidance's automaton: 10,000 take 0.1 s, a million 12 s (1.9.1).
_MAX_REMAINDERS = 10_000
_KINDS = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_UPPER = ("maximum", "exclusiveMaximum")
_LOWER = ("minimum", "exclusiveMinimum")
# Keywords that contain schemas, and keywords that contain schemas under names of the author's
# choice.
_SCHEMAS = frozenset(
    {
        "items",
        "additionalItems",
        "prefixItems",
        "additionalProperties",
        "anyOf",
        "oneOf",
        "allOf",
    }
)
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
# A grammar can't compare the items of a list. Programs that want a set remove repeated items, and
# llama.cpp ignores the keyword. So even a strict schema may have it.
NOT_COMPARED = frozenset({"uniqueItems"})
# Keywords of draft 3, which llguidance ignores, and those that no grammar can enforce.
_PASSED_OVER = ("disallow", "divisibleBy", "extends", *NOT_COMPARED)
_NO_EFFECT = (("uniqueItems", False), ("required", True), ("required", False))
# Lookaround and backreferences, which automata do not support.
_BEYOND_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")
# A character class in an expression. Escaped characters before it are skipped.
_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])+)\]", re.DOTALL)


def convert_node(node: Any, refused: set[str]) -> Any:
    """`node` in llguidance's form. Keywords that are left out are added to `refused`."""
    if isinstance(node, list):
        return [convert_node(inner, refused) for inner in node]
    if not isinstance(node, dict):
        return node
    out = {word: _inside(word, value, refused) for word, value in node.items()}
    for word, value in _NO_EFFECT:
        if out.get(word) is value:
            del out[word]
    if "oneOf" in out:
        # With a discriminator, llguidance itself finds the property that distinguishes the
        # alternatives, also through references.
        out.setdefault("discriminator", {"propertyName": ""})
    _name_members(out)
    passed_over = [word for word in _PASSED_OVER if word in out]
    for word in (*passed_over, *_not_as_written(out)):
        refused.add(word)
        del out[word]
    return out


def _name_members(out: dict[str, Any]) -> None:
    """Replace `propertyNames`, which llguidance lacks. zod prints it for each record.

    Names that may be any text need no keyword. Listed names become members.
    """
    names = out.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del out["propertyNames"]
        return
    if not isinstance(names, dict) or not isinstance(names.get("enum"), list):
        return
    if names.keys() - {"enum", "type"} or "properties" in out or "patternProperties" in out:
        return
    del out["propertyNames"]
    value = out.get("additionalProperties", True)
    out["properties"] = {name: value for name in names["enum"] if isinstance(name, str)}
    out["additionalProperties"] = False


def _inside(word: str, value: Any, refused: set[str]) -> Any:
    if word in NAMED and isinstance(value, dict):
        taken = {}
        for name, inner in value.items():
            if word == "patternProperties":
                name = _escapable(name)
            taken[name] = convert_node(inner, refused)
        return taken
    if word in _SCHEMAS:
        return convert_node(value, refused)
    if word == "pattern" and isinstance(value, str):
        return _escapable(value)
    if word == "type":
        if isinstance(value, list):
            return [_lower(kind) for kind in value]
        return _lower(value)
    return value


def _lower(kind: Any) -> Any:
    if isinstance(kind, str):
        return kind.lower()
    return kind


def _not_as_written(out: dict[str, Any]) -> list[str]:
    """The keywords of `out` that llguidance would enforce differently from their meaning.

    Also replaces unsupported formats and bounds in `out` by supported ones.
    """
    if str(out.get("format", "date")) not in FORMATS:
        # Formats outside the specification are annotations (draft 2020-12, validation 7.2.1).
        expression = EXPRESSIONS.get(str(out.pop("format")))
        if expression is not None and "pattern" in out:
            return ["pattern"]
        if expression is not None:
            out["pattern"] = _escapable(expression)
    # A tighter bound never allows a wrong value, although it excludes some right ones.
    for word in _UPPER:
        if _is_number(out.get(word)) and out[word] > _LARGEST:
            out[word] = _LARGEST
    for word in _LOWER:
        if _is_number(out.get(word)) and out[word] < -_LARGEST:
            out[word] = -_LARGEST
    return [word for word, (is_wrong, _) in _WRONG.items() if word in out and is_wrong(out[word])]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_no_bound(value: Any) -> bool:
    """True for an invalid bound. In draft 4, an exclusive bound is a boolean that modifies the
    other."""
    return not isinstance(value, bool) and not (_is_number(value) and abs(value) <= _LARGEST)


def _is_beyond_regular(pattern: Any) -> bool:
    return isinstance(pattern, str) and bool(_BEYOND_REGULAR.search(pattern))


def _is_no_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return not kinds or not all(isinstance(kind, str) and kind in _KINDS for kind in kinds)


def _has_many_remainders(divisor: Any) -> bool:
    if not _is_number(divisor):
        return False
    _, digits, exponent = Decimal(str(divisor)).normalize().as_tuple()
    if not isinstance(exponent, int):  # infinity
        return True
    return len(digits) + max(0, exponent) > len(str(_MAX_REMAINDERS)) - 1


def _is_inexact(value: Any) -> bool:
    """True if llguidance would change some number in `value`."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(_is_inexact(inner) for inner in value)
    if not _is_number(value) or abs(value) <= _EXACT:
        return False
    return not abs(value) <= _LARGEST or int(float(value)) != value


# Keywords that llguidance may enforce differently from their meaning: a function that is True for
# such a value, and the reason for the refusal.
_WRONG: dict[str, tuple[Callable[[Any], bool], str]] = {}
for _word in (*_UPPER, *_LOWER):
    _WRONG[_word] = (_is_no_bound, "not a number of at most 2^62")
for _word in ("const", "enum"):
    _WRONG[_word] = (_is_inexact, "not supported with integers beyond 2^53")
_WRONG |= {
    "multipleOf": (
        _has_many_remainders,
        f"not supported with more than {_MAX_REMAINDERS:,} remainders",
    ),
    "pattern": (_is_beyond_regular, "not supported"),
    "type": (_is_no_type, "not supported"),
}


def rejection_reason(word: str) -> str:
    if word in _WRONG:
        return _WRONG[word][1]
    return "not supported"


def _escapable(pattern: str) -> str:
    r"""`pattern` with form feeds excluded from negated character classes.

    llguidance (1.9.1) has a bug: a class with all of \b \t \n \f \r also matches \ and ".
    """

    def narrowed(found: re.Match[str]) -> str:
        if found[1] is None or not (found[1] or r"\x0" in found[2] or r"\u00" in found[2]):
            return found[0]
        if found[1]:
            return f"[^{found[2]}\\f]"
        return f"[{found[2]}--\\f]"

    return _CLASS.sub(narrowed, pattern)
