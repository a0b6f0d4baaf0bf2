"""Gemma's notation: JSON with a control token for a text's quotes and none at keys. Read, and as Lark rules."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from localllm.conversation.tools.base import Grammar, Named, UnheldError
from localllm.conversation.tools.lark import json_value, listed_calls, text
from localllm.conversation.tools.readers import Call, as_json
from localllm.conversation.tools.schemas import is_text, names_all, parameters

_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE_TEXT = re.compile(r"[^,:{}\[\]<]+")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]+")
_BARE = frozenset({"integer", "number", "boolean", "null"})
# Words about values within a value that its rules here would not keep.
_UNKEPT = frozenset({"allOf", "oneOf", "not", "if", "prefixItems", "contains", "uniqueItems"})
# A schema that refers to itself has no end here.
_MOST_NESTED = 8


def calls_in(quote: str) -> Callable[[str], list[Call] | None]:
    """A parser of one call's block in Gemma's notation: JSON without quotes around keys, and `quote` around texts."""

    def parse(block: str) -> list[Call] | None:
        match = _CALL.match(block)
        if match is None:
            return None
        try:
            values, at = _read_value(block, match.end(), quote)
        except (ValueError, RecursionError):
            return None
        if block[at:].strip():
            return None
        return [(match[1], as_json(values))]

    return parse


def _read_value(block: str, at: int, quote: str) -> tuple[object, int]:
    """The value at `at` and where it ends. Raises ValueError where there is none."""
    at = _behind_space(block, at)
    if block.startswith(quote, at):
        end = block.index(quote, at + len(quote))
        return block[at + len(quote) : end], end + len(quote)
    if block.startswith("{", at):
        members: dict[str, object] = {}
        at = _behind_space(block, at + 1)
        while not block.startswith("}", at):
            key, at = _read_key(block, at, quote)
            members[key], at = _read_value(block, at, quote)
            at = _behind_comma(block, at, "}")
        return members, at + 1
    if block.startswith("[", at):
        items: list[object] = []
        at = _behind_space(block, at + 1)
        while not block.startswith("]", at):
            item, at = _read_value(block, at, quote)
            items.append(item)
            at = _behind_comma(block, at, "]")
        return items, at + 1
    bare = _BARE_TEXT.match(block, at)
    if bare is None:
        raise ValueError
    text = bare[0].strip()
    try:
        return json.loads(text), bare.end()
    except ValueError:
        return text, bare.end()


def _read_key(block: str, at: int, quote: str) -> tuple[str, int]:
    if block.startswith(quote, at):
        end = block.index(quote, at + len(quote))
        key, at = block[at + len(quote) : end], end + len(quote)
    else:
        bare = _BARE_TEXT.match(block, at)
        if bare is None:
            raise ValueError
        key, at = bare[0].strip(), bare.end()
    at = _behind_space(block, at)
    if not block.startswith(":", at):
        raise ValueError
    return key, at + 1


def _behind_comma(block: str, at: int, close: str) -> int:
    at = _behind_space(block, at)
    if block.startswith(",", at):
        return _behind_space(block, at + 1)
    if not block.startswith(close, at):
        raise ValueError
    return at


def _behind_space(block: str, at: int) -> int:
    match = _SPACE.match(block, at)
    return match.end() if match is not None else at


def gemma_calls(tools: Named, quote: str) -> Grammar:
    """One call of `tools` with `quote` (a control token) around texts. Raises UnheldError where some value or name has
    no place in the notation."""
    rules: list[str] = []

    def pair(key: str, described: Any, schema: Mapping[str, Any]) -> str:
        return f"{text(key + ':')} {_value(described, schema, quote, rules, 1)}"

    if not all(_NAME.fullmatch(name) for name, _ in tools):
        raise UnheldError
    kind, source = listed_calls(
        [(n, _sorted(s)) for n, s in tools], head=lambda n: f"call:{n}{{", between=",", end="}", pair=pair
    )
    return kind, source + "".join(f"{rule}\n" for rule in rules)


def _sorted(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with its parameters as Gemma's templates sort them (Jinja's dictsort passes over case)."""
    names = [(key, described) for key, described, _ in parameters(schema)]
    if not names_all(schema) or not all(_NAME.fullmatch(key) for key, _ in names):
        raise UnheldError
    return {**schema, "properties": dict(sorted(names, key=lambda pair: pair[0].lower()))}


def _value(described: Any, schema: Mapping[str, Any], quote: str, rules: list[str], depth: int) -> str:
    """The Lark of a value, whose own rules are put into `rules`."""
    described = _resolved(described, schema)
    options = [described["const"]] if "const" in described else described.get("enum")
    if isinstance(options, list) and options:
        return f"({' | '.join(_constant(o, quote) for o in options)})"
    if depth > _MOST_NESTED or _UNKEPT & set(described):
        raise UnheldError
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
    raise UnheldError


def _object(described: Mapping[str, Any], schema: Mapping[str, Any], quote: str, rules: list[str], depth: int) -> str:
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
        raise UnheldError
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
    raise UnheldError


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
    raise UnheldError
