"""Converts one schema to llguidance's form, keyword by keyword."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from localllm.grammars.formats import EXPRESSIONS, FORMATS

# llguidance crashes on bounds beyond 64 bits.
_MAX_BOUND = 4_000_000_000_000_000_000
# llguidance stores constants as 64-bit floats, so a larger integer would be changed.
_MAX_EXACT = 2**53
# Each remainder is a state of llguidance's automaton: 10,000 take 0.1 s, a million 12 s (1.9.1).
_MAX_REMAINDERS = 10_000
_TYPES = frozenset({"null", "boolean", "number", "integer", "string", "array", "object"})
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
# Keywords that contain schemas, and keywords that contain schemas under names of the author's
# choice.
_SCHEMA_KEYWORDS = frozenset(
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
_UNENFORCED = ("disallow", "divisibleBy", "extends", *NOT_COMPARED)
_NO_EFFECT = (("uniqueItems", False), ("required", True), ("required", False))
# Lookaround and backreferences, which automata do not support.
_NOT_REGULAR = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]|\\k<")
# A character class in an expression. Escaped characters before it are skipped.
_CLASS = re.compile(r"\\.|\[(\^?)((?:\\.|[^\]\\])+)\]", re.DOTALL)


def convert_node(node: Any, refused: set[str]) -> Any:
    """`node` in llguidance's form. Keywords that are left out are added to `refused`."""
    if isinstance(node, list):
        return [convert_node(inner, refused) for inner in node]
    if not isinstance(node, dict):
        return node
    converted = {word: _converted_value(word, value, refused) for word, value in node.items()}
    for word, value in _NO_EFFECT:
        if converted.get(word) is value:
            del converted[word]
    if "oneOf" in converted:
        # With a discriminator, llguidance itself finds the property that distinguishes the
        # alternatives, also through references.
        converted.setdefault("discriminator", {"propertyName": ""})
    _name_members(converted)
    unenforced = [word for word in _UNENFORCED if word in converted]
    for word in (*unenforced, *_misread_keywords(converted)):
        refused.add(word)
        del converted[word]
    return converted


def _name_members(schema: dict[str, Any]) -> None:
    """Replace `propertyNames`, which llguidance lacks. zod prints it for each record.

    Names that may be any text need no keyword. Listed names become members.
    """
    names = schema.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del schema["propertyNames"]
        return
    if not isinstance(names, dict) or not isinstance(names.get("enum"), list):
        return
    if names.keys() - {"enum", "type"} or "properties" in schema or "patternProperties" in schema:
        return
    del schema["propertyNames"]
    value = schema.get("additionalProperties", True)
    schema["properties"] = {name: value for name in names["enum"] if isinstance(name, str)}
    schema["additionalProperties"] = False


def _converted_value(word: str, value: Any, refused: set[str]) -> Any:
    if word in NAMED and isinstance(value, dict):
        converted = {}
        for name, inner in value.items():
            if word == "patternProperties":
                name = _with_safe_classes(name)
            converted[name] = convert_node(inner, refused)
        return converted
    if word in _SCHEMA_KEYWORDS:
        return convert_node(value, refused)
    if word == "pattern" and isinstance(value, str):
        return _with_safe_classes(value)
    if word == "type":
        if isinstance(value, list):
            return [_lower_case(kind) for kind in value]
        return _lower_case(value)
    return value


def _lower_case(kind: Any) -> Any:
    if isinstance(kind, str):
        return kind.lower()
    return kind


def _misread_keywords(schema: dict[str, Any]) -> list[str]:
    """The keywords of `schema` that llguidance would enforce differently from their meaning.

    Also replaces unsupported formats and bounds in `schema` by supported ones.
    """
    if str(schema.get("format", "date")) not in FORMATS:
        # Formats outside the specification are annotations (draft 2020-12, validation 7.2.1).
        expression = EXPRESSIONS.get(str(schema.pop("format")))
        if expression is not None and "pattern" in schema:
            return ["pattern"]
        if expression is not None:
            schema["pattern"] = _with_safe_classes(expression)
    # A tighter bound never allows a wrong value, although it excludes some right ones.
    for word in _UPPER_BOUNDS:
        if _is_number(schema.get(word)) and schema[word] > _MAX_BOUND:
            schema[word] = _MAX_BOUND
    for word in _LOWER_BOUNDS:
        if _is_number(schema.get(word)) and schema[word] < -_MAX_BOUND:
            schema[word] = -_MAX_BOUND
    return [
        word
        for word, (is_misread, _) in _MISREAD.items()
        if word in schema and is_misread(schema[word])
    ]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_invalid_bound(value: Any) -> bool:
    """True for an invalid bound. In draft 4, an exclusive bound is a boolean that modifies the
    other."""
    return not isinstance(value, bool) and not (_is_number(value) and abs(value) <= _MAX_BOUND)


def _is_not_regular(pattern: Any) -> bool:
    return isinstance(pattern, str) and bool(_NOT_REGULAR.search(pattern))


def _is_invalid_type(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return not kinds or not all(isinstance(kind, str) and kind in _TYPES for kind in kinds)


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
    if not _is_number(value) or abs(value) <= _MAX_EXACT:
        return False
    return not abs(value) <= _MAX_BOUND or int(float(value)) != value


# Keywords that llguidance may enforce differently from their meaning: a function that is True for
# such a value, and the reason for the refusal.
_MISREAD: dict[str, tuple[Callable[[Any], bool], str]] = {}
for _word in (*_UPPER_BOUNDS, *_LOWER_BOUNDS):
    _MISREAD[_word] = (_is_invalid_bound, "not a number of at most 2^62")
for _word in ("const", "enum"):
    _MISREAD[_word] = (_is_inexact, "not supported with integers beyond 2^53")
_MISREAD |= {
    "multipleOf": (
        _has_many_remainders,
        f"not supported with more than {_MAX_REMAINDERS:,} remainders",
    ),
    "pattern": (_is_not_regular, "not supported"),
    "type": (_is_invalid_type, "not supported"),
}


def rejection_reason(word: str) -> str:
    if word in _MISREAD:
        return _MISREAD[word][1]
    return "not supported"


def _with_safe_classes(pattern: str) -> str:
    r"""`pattern` with form feeds excluded from negated character classes.

    llguidance (1.9.1) has a bug: a class with all of \b \t \n \f \r also matches \ and ".
    """

    def safe_class(match: re.Match[str]) -> str:
        if match[1] is None or not (match[1] or r"\x0" in match[2] or r"\u00" in match[2]):
            return match[0]
        if match[1]:
            return f"[^{match[2]}\\f]"
        return f"[{match[2]}--\\f]"

    return _CLASS.sub(safe_class, pattern)
