"""Lark rules of values in Gemma's notation, which is JSON with a control token for a text's quotes and none at keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from localllm.conversation.tools.lark import (
    Grammar,
    Named,
    is_text,
    json_value,
    listed_calls,
    names_all,
    parameters,
    text,
)

_NAME = re.compile(r"[\w.-]+")
_BARE = frozenset({"integer", "number", "boolean", "null"})
# Words about values within a value that its rules here would not keep.
_UNKEPT = frozenset({"allOf", "oneOf", "not", "if", "prefixItems", "contains", "uniqueItems"})
# A schema that refers to itself has no end here.
_MOST_NESTED = 8


def gemma_calls(tools: Named, quote: str) -> Grammar | None:
    """One call of `tools` with `quote` (a control token) around texts; None where some value or name can't be held."""
    rules: list[str] = []

    def pair(key: str, described: Any, schema: Mapping[str, Any]) -> str:
        return f"{text(key + ':')} {_value(described, schema, quote, rules, 1)}"

    try:
        if not all(_NAME.fullmatch(name) for name, _ in tools):
            return None
        lark = listed_calls(
            [(n, _sorted(s)) for n, s in tools], head=lambda n: f"call:{n}{{", between=",", end="}", pair=pair
        )
    except _UnheldError:
        return None
    kind, source = lark
    return kind, source + "".join(f"{rule}\n" for rule in rules)


class _UnheldError(Exception):
    """A value for which there are no rules."""


def _sorted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with its parameters as Gemma's templates sort them (Jinja's dictsort passes over case)."""
    names = [(key, described) for key, described, _ in parameters(schema)]
    if not all(_NAME.fullmatch(key) for key, _ in names):
        raise _UnheldError
    return {**schema, "properties": dict(sorted(names, key=lambda pair: pair[0].lower()))}


def _value(described: Any, schema: Mapping[str, Any], quote: str, rules: list[str], depth: int) -> str:
    """The Lark of a value, whose own rules are put into `rules`."""
    described = _resolved(described, schema)
    options = [described["const"]] if "const" in described else described.get("enum")
    if isinstance(options, list) and options:
        return f"({' | '.join(_constant(o, quote) for o in options)})"
    if depth > _MOST_NESTED or _UNKEPT & set(described):
        raise _UnheldError
    either = described.get("anyOf")
    if isinstance(either, list) and either:
        return f"({' | '.join(_value(e, schema, quote, rules, depth + 1) for e in either)})"
    if is_text(described):
        return f"{quote} /(?s:.*)/ {quote}"
    kind = described.get("type")
    if isinstance(kind, str) and kind in _BARE:
        return json_value(described)
    if kind == "object":
        return _object(described, schema, quote, rules, depth)
    if kind == "array":
        return _array(described, schema, quote, rules, depth)
    raise _UnheldError


def _object(described: Mapping[str, Any], schema: Mapping[str, Any], quote: str, rules: list[str], depth: int) -> str:
    if not names_all(described):
        raise _UnheldError
    members = parameters(_sorted(described))
    parts = [f"{text(k + ':')} {_value(d, schema, quote, rules, depth + 1)}" for k, d, _ in members]
    name = f"o{len(rules)}"
    for i, (part, (_, _, wanted)) in enumerate(zip(parts, members, strict=True)):
        rules += [
            f"{name}_p{i}: {part}",
            f"{name}_first{i}: {name}_p{i} {name}_more{i + 1}" + ("" if wanted else f" | {name}_first{i + 1}"),
            f'{name}_more{i}: "," {name}_p{i} {name}_more{i + 1}' + ("" if wanted else f" | {name}_more{i + 1}"),
        ]
    rules += [f'{name}_first{len(parts)}: ""', f'{name}_more{len(parts)}: ""']
    return f'"{{" {name}_first0 "}}"'


def _array(described: Mapping[str, Any], schema: Mapping[str, Any], quote: str, rules: list[str], depth: int) -> str:
    low, high = described.get("minItems", 0), described.get("maxItems")
    if type(low) is not int or (high is not None and (type(high) is not int or high < max(1, low))):
        raise _UnheldError
    item = _value(described.get("items", {"type": "string"}), schema, quote, rules, depth + 1)
    name = f"a{len(rules)}"
    rules.append(f"{name}: {item}")
    more = f'("," {name}){{{max(0, low - 1)},{"" if high is None else high - 1}}}'
    return f'"[" {name} {more} "]"' if low else f'"[" ({name} {more})? "]"'


def _constant(value: Any, quote: str) -> str:
    if isinstance(value, str) and quote not in value:
        return f"{quote} {text(value)} {quote}" if value else f"{quote} {quote}"
    if value is None or isinstance(value, bool | int | float):
        return text(json.dumps(value))
    raise _UnheldError


def _resolved(described: Any, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`described`, or what it refers to within `schema`."""
    for _ in range(_MOST_NESTED):
        if not isinstance(described, Mapping):
            break
        reference = described.get("$ref")
        if reference is None:
            return described
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        described = schema
        for part in reference[2:].split("/"):
            described = described.get(part) if isinstance(described, Mapping) else None
    raise _UnheldError
