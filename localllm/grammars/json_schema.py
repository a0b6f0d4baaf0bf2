"""The one translator of JSON schemas: whatever one is for, what it says comes out as the grammar
engine keeps it.

A schema that comes out is exact: its references lead to `$defs` of its own, words that only
describe are gone, and words that llguidance does not know are said with others that it does
(`oneOf`, `not`, `if`, `dependencies`, `propertyNames`; those in schema_words.py). What can't be
said so is left out and named: a caller that must keep all refuses it.
"""

from __future__ import annotations

import json
import re
import time
from functools import lru_cache
from typing import Any

from localllm.errors import UnsupportedError
from localllm.grammars.deep_stack import check_parts
from localllm.grammars.json_lark import ANY_ORDER, JsonRules
from localllm.grammars.member_names import Schema
from localllm.grammars.schema_words import holds, made_of
from localllm.grammars.translator import BOUNDS, INERT, Translator

# Words whose value decides: tried without each, in this order, then without all of them up to each.
_AT_TIMES = (
    "pattern", "format", "patternProperties", "multipleOf", "maxLength", "minLength", "minimum",
    "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "minProperties",
    "maxProperties", "prefixItems",
    "additionalProperties", "enum", "const", "allOf", "anyOf", "$ref", "items", "type", "required",
)  # fmt: skip
# A search for what to leave out of a schema that can't be kept ends after so long: then any object
# will do.
_SEARCH_S = 0.5
# Lark's strings, comments and expressions, which are skipped, and the mark in front of a schema.
_JSON = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(%json\s*)(?=[{tf])')


def translated(schema: Any) -> Schema:
    """`schema` as the engine keeps it, all of it. Raises UnsupportedError, which names what can't
    be kept."""
    try:
        result, unsupported = _translated(json.dumps(schema))
    except RecursionError as e:
        raise UnsupportedError("the json_schema can't be enforced: it is nested too deeply") from e
    if unsupported:
        reasons = [
            f"{w} is {'beyond 2^62' if w in BOUNDS else 'not supported'}" for w in unsupported
        ]
        raise UnsupportedError(f"the json_schema can't be enforced: {', '.join(reasons)}")
    return result


def schemas_in(lark: str) -> str:
    """A Lark grammar with rules for every schema in it. Raises UnsupportedError, and ValueError for
    what is no JSON."""
    parts: list[str] = []
    rules: list[str] = []
    at = n = 0
    while (found := _JSON.search(lark, at)) is not None:
        parts.append(lark[at : found.end() if not found[1] else found.start()])
        at = found.end()
        if found[1]:
            schema, at = json.JSONDecoder().raw_decode(lark, at)
            any_order = isinstance(schema, dict) and schema.get(ANY_ORDER) is True
            value, more = _rules(translated(schema), f"json{n}_", any_order=any_order)
            parts.append(value)
            rules += more
            n += 1
    return "".join(
        [*parts, lark[at:], *([chr(10)] if rules else []), *(f"{rule}\n" for rule in rules)]
    )


def _rules(kept: Schema, prefix: str, *, any_order: bool = False) -> tuple[str, list[str]]:
    """The Lark of a value, and its rules. Raises UnsupportedError."""
    writer = JsonRules(prefix, any_order=any_order)
    try:
        value = writer.value(kept)
    except RecursionError as e:
        raise UnsupportedError(
            "the json_schema can't be enforced: it leads to itself too often"
        ) from e
    if value == writer.never:
        why = holds(kept)
        why = why if "Unsatisfiable" in why else "nothing matches it, or nothing that ends"
        raise UnsupportedError(f"the json_schema can't be enforced: {why}")
    return value, writer.rules


def _why_not(kept: Schema) -> str:
    """Why the engine can't keep a translated schema; empty where it can."""
    from llguidance import LLMatcher

    try:
        value, rules = _rules(kept, "json_")
    except UnsupportedError as e:
        return str(e)
    return made_of(LLMatcher.grammar_from_lark("\n".join([f"start: {value}", *rules])))


def loosened(schema: Any) -> tuple[Schema, tuple[str, ...]]:
    """`schema` without what the engine can't keep, and the words that are left out or mean less
    than they say."""
    try:
        return _loosened(json.dumps(schema))
    except (RecursionError, ValueError):
        return True, ("schema",)


def enforceable(grammar: tuple[str, str] | None) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """A constraint as the engine takes it: a schema that need not hold whole (`loose_schema`)
    without what can't be kept, and the names of that as response_format.WORD. Raises
    UnsupportedError for one of too many parts."""
    if grammar is None or grammar[0] != "loose_schema":
        return grammar, ()
    check_parts(grammar[1])
    schema, words = loosened(json.loads(grammar[1]))
    return ("json_schema", json.dumps(schema)), tuple(f"response_format.{word}" for word in words)


@lru_cache(maxsize=512)  # an agent sends the same tools with every turn
def _translated(text: str) -> tuple[Schema, tuple[str, ...]]:
    translator = Translator(json.loads(text))
    result = translator.translated()
    return result, tuple(sorted(translator.unsupported))


@lru_cache(maxsize=512)
def _loosened(text: str) -> tuple[Schema, tuple[str, ...]]:
    result, words = _translated(text)
    found = set(words)
    if _why_not(result):
        result = _without_what_breaks(result, found)
    return result, tuple(sorted(found))


def _without_what_breaks(schema: Schema, found: set[str]) -> Schema:
    """`schema` without as few words as make it one that can be kept, tried for a limited time. They
    are added to `found`."""
    if isinstance(schema, bool):
        found.add("schema")
        return True
    until = time.monotonic() + _SEARCH_S
    properties = schema.get("properties")
    # one that breaks costs the others nothing
    if isinstance(properties, dict) and "$defs" not in schema:
        for name, inner in properties.items():
            if _why_not(inner):
                fewer = _fewer_words(inner, found, until)
                properties = {**properties, name: True if fewer is None else fewer}
                if fewer is None:
                    found.add(name)
        schema = {**schema, "properties": properties}
        if not _why_not(schema):
            return schema
    fewer = _fewer_words(schema, found, until)
    if fewer is None:
        found.add("schema")
        return True
    return fewer


def _fewer_words(schema: Schema, found: set[str], until: float) -> Schema | None:
    for some in [
        *({word} for word in _AT_TIMES),
        *(set(_AT_TIMES[:n]) for n in range(2, len(_AT_TIMES) + 1)),
    ]:
        more: set[str] = set()
        rest: Schema = _without(schema, some, more)
        if time.monotonic() > until:
            return None
        if more and not _why_not(rest):
            found |= more
            return rest
    return None


def _without(schema: Any, words: set[str], found: set[str]) -> Any:
    if isinstance(schema, list):
        return [_without(inner, words, found) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    rest: dict[str, Any] = {}
    for word, value in schema.items():
        if word in words:
            found.add(word)
        elif word in ("properties", "patternProperties", "$defs"):
            rest[word] = {name: _without(inner, words, found) for name, inner in value.items()}
        else:
            rest[word] = value if word in INERT else _without(value, words, found)
    return rest
