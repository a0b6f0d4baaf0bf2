"""Whether a value matches a schema in the engine's words: a schema that names its values is said as
those that match."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from operator import ge, gt, le, lt
from typing import Any

TYPES = ("null", "boolean", "number", "string", "array", "object")
# The type that a word speaks of, and the word that allows what it does not, with the step between
# them.
OPPOSITE: Mapping[str, tuple[str, str, int]] = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
SPEAKS_OF: Mapping[str, str] = {
    **{word: kind for word, (kind, _, _) in OPPOSITE.items()}, "multipleOf": "number",
    "pattern": "string",
    "format": "string", "items": "array", "prefixItems": "array", "properties": "object",
    "required": "object",
    "patternProperties": "object", "additionalProperties": "object",
}  # fmt: skip
_COMPARED: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any], bool]]] = {
    "minimum": (float, ge), "maximum": (float, le), "exclusiveMinimum": (float, gt),
    "exclusiveMaximum": (float, lt),
    **{f"min{counted}": (len, ge) for counted in ("Length", "Items", "Properties")},
    **{f"max{counted}": (len, le) for counted in ("Length", "Items", "Properties")},
}  # fmt: skip
# Schemas in schemas, references followed.
_MOST_NESTED = 12


def picked(schema: Any, leads: Callable[[str], Any]) -> Any:
    """`schema` as the values that match it, where it names them: said so they cost a grammar
    nothing."""
    values = values_of(schema, deep=True)
    if values is None or set(schema) <= {"enum", "const"}:
        return schema
    right = [matches(schema, value, leads) for value in values]
    if None in right:
        return schema
    kept = [value for value, good in zip(values, right, strict=True) if good]
    return {"enum": kept} if kept else False


def matches(schema: Any, value: Any, leads: Callable[[str], Any], depth: int = 0) -> bool | None:
    """Whether `value` matches; None where that can't be told."""
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return None if isinstance(schema, dict) else bool(schema)
    if isinstance(value, list) and "prefixItems" in schema:
        return None
    found = [_word_accepts(word, said, value, leads, depth + 1) for word, said in schema.items()]
    if isinstance(value, dict) and {"additionalProperties", "patternProperties"} & set(schema):
        named = schema.get("properties", {})
        extra = None if "patternProperties" in schema else schema["additionalProperties"]
        found += [
            matches(extra, inner, leads, depth + 1)
            for name, inner in value.items()
            if name not in named
        ]
    return _all_accept(found)


def _word_accepts(
    word: str, said: Any, value: Any, leads: Callable[[str], Any], depth: int
) -> bool | None:
    if word in ("const", "enum"):
        listed = [said] if word == "const" else said
        return (
            value in listed if isinstance(value, str) else any(_same(one, value) for one in listed)
        )
    kind = kind_of(value)
    if word == "type":
        kinds = [said] if isinstance(said, str) else said
        return kind in kinds or (kind == "number" and "integer" in kinds and value == int(value))
    if word in ("allOf", "anyOf"):
        found = [matches(inner, value, leads, depth) for inner in said]
        return _any_accept(found) if word == "anyOf" else _all_accept(found)
    if word == "$ref":
        return matches(leads(said), value, leads, depth)
    if SPEAKS_OF.get(word, kind) != kind:
        return True
    if word == "items":
        return _all_accept([matches(said, inner, leads, depth) for inner in value])
    if word == "properties":
        return _all_accept(
            [matches(said[name], value[name], leads, depth) for name in value if name in said]
        )
    return _of_one_kind(word, said, value)


def _of_one_kind(word: str, said: Any, value: Any) -> bool | None:
    """Whether `value` is right by a word that speaks of its type alone."""
    if word in _COMPARED:
        size, good = _COMPARED[word]
        return good(size(value), said)
    if word == "required":
        return set(said) <= set(value)
    if word == "additionalProperties":
        return True  # with the others' names, in `matches`
    if word == "pattern":
        try:
            return re.search(said, value, re.ASCII) is not None
        except re.error:
            return None
    return None


def _all_accept(answers: Sequence[bool | None]) -> bool | None:
    """False where one is, None where one can't be told."""
    if False in answers:
        return False
    return None if None in answers else True


def _any_accept(answers: Sequence[bool | None]) -> bool | None:
    """True where one is, None where one can't be told."""
    if True in answers:
        return True
    return None if None in answers else False


def values_of(schema: Any, *, deep: bool = False) -> list[Any] | None:
    """The only values that may match, where it names them; `deep`: or a part of it does."""
    if not isinstance(schema, dict):
        return None
    if {"enum", "const"} & set(schema):
        return [schema["const"]] if "const" in schema else list(schema["enum"])
    parts = (values_of(part, deep=True) for part in schema.get("allOf", ()) if deep)
    return next((values for values in parts if values is not None), None)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are one to JSON Schema: 1.0 is 1, and true is not."""
    if kind_of(one) != kind_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _same(inner, other[name]) for name, inner in one.items()
        )
    return bool(one == other)


def kind_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {int: "number", float: "number", str: "string", list: "array"}.get(type(value), "object")


def without_endless(definitions: Mapping[str, Any]) -> dict[str, Any]:
    """`definitions`, of which those that only what never ends matches (a member that must be there
    leads back) are False."""
    ending: set[str] = set()

    while True:
        more = {
            name
            for name, schema in definitions.items()
            if name not in ending and _ends(schema, ending)
        }
        if not more:
            return {
                name: schema if name in ending else False for name, schema in definitions.items()
            }
        ending |= more


def _ends(schema: Any, ending: Set[str]) -> bool:
    """Whether something that ends matches, as far as the definitions that are known to are
    `ending`."""
    if not isinstance(schema, dict):
        return bool(schema)
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if not any(_ends(way, ending) for way in schema.get("anyOf", (True,))):
        return False
    needed = [*schema.get("allOf", ()), *_needed(schema)]
    return all(_ends(part, ending) for part in needed)


def _needed(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of what must be in a value of one type: required members, or items."""
    kinds = schema.get("type", TYPES)
    if kinds in ("object", ["object"]) and "patternProperties" not in schema:
        named, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        return [named.get(name, extra) for name in schema.get("required", ())]
    if kinds in ("array", ["array"]) and schema.get("minItems"):
        return [schema.get("items", True), *schema.get("prefixItems", ())]
    return []
