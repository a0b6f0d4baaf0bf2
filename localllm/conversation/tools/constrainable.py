"""What of a tool's JSON schema a grammar can keep. The rest is left out of the grammar and named: one word that nobody can
hold a model to costs neither the other words of its schema their effect nor the other tools theirs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from localllm.conversation.tools.base import Tool, parameters_of
from localllm.conversation.tools.schemas import as_object

# Words that llguidance refuses, or passes over without a word.
_NEVER = frozenset(
    {
        "contains", "dependencies", "dependentRequired", "dependentSchemas", "disallow", "divisibleBy", "else", "extends",
        "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems",
    }
)  # fmt: skip
# llguidance reads bounds as 64-bit integers, and dies of two that are both beyond them.
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_LARGEST_BOUND = 2**62
# Words whose value decides: tried without each, in this order, then without all of them up to each.
_AT_TIMES = (
    "format", "pattern", "patternProperties", "multipleOf", "maxLength", "minLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "minItems", "maxItems", "minProperties", "maxProperties", "prefixItems",
    "additionalProperties", "enum", "const", "allOf", "anyOf", "$ref", "items", "type", "required",
)  # fmt: skip
_ANYTHING = '{"type": "object"}', ("parameters",)
# Where schemas stand under names of the author's choosing, and where values stand that are no schemas.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_INERT = frozenset({"const", "enum", "default", "examples", "example", "required"})


def constrainable(tools: Sequence[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """`tools` with schemas that a grammar can keep, and what was left out of them, as tools.NAME.WORD."""
    kept: list[Tool] = []
    left_out: list[str] = []
    for tool in tools:
        name, schema = parameters_of(tool)
        try:
            text, words = _kept(json.dumps(as_object(schema)))
        except RecursionError:
            text, words = _ANYTHING
        left_out += [f"tools.{name}.{word}" for word in words]
        # That oneOf became anyOf is no word left out.
        kept.append({**tool, "function": {**tool["function"], "parameters": json.loads(text)}})
    return kept, tuple(left_out)


@lru_cache(maxsize=512)  # an agent sends the same tools with every turn
def _kept(text: str) -> tuple[str, tuple[str, ...]]:
    """A schema's text without the words that can't be kept, and those words."""
    schema = json.loads(text)
    found: set[str] = set()
    schema = _without(schema, _NEVER, found)
    if not _holds(schema):
        schema = _by_parameter(schema, found)
    whole = _tried(schema, found)
    return (json.dumps(whole), tuple(sorted(found))) if whole is not None else _ANYTHING


def _by_parameter(schema: dict[str, Any], found: set[str]) -> dict[str, Any]:
    """`schema` with each of its parameters made such that it can be kept by itself."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return schema
    definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
    kept: dict[str, Any] = {}
    for name, described in properties.items():
        alone = {**definitions, **described} if isinstance(described, Mapping) else {}
        tried = _tried(alone, found)
        if tried is None:
            found.add(str(name))
            tried = {}
        kept[name] = {word: value for word, value in tried.items() if word not in definitions}
    return {**schema, "properties": kept}


def _tried(schema: dict[str, Any], found: set[str]) -> dict[str, Any] | None:
    """`schema` without as many of the words whose value decides as it takes; they are added to `found`. None where it
    can't be kept without all of them."""
    for some in [set(), *({word} for word in _AT_TIMES), *(set(_AT_TIMES[:n]) for n in range(2, len(_AT_TIMES) + 1))]:
        more: set[str] = set()
        rest: dict[str, Any] = _without(schema, frozenset(some), more)
        if (more or not some) and _holds(rest):
            found |= more
            return rest
    return None


def _holds(schema: Any) -> bool:
    """True where a grammar of `schema` can be made. Which vocabulary it is for makes no difference."""
    from llguidance import LLMatcher

    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)), None)


def _without(schema: Any, words: frozenset[str], found: set[str]) -> Any:
    """`schema` without `words`, those that it had are added to `found`. Of alternatives one is to match, whether or not
    another does too (`oneOf` as `anyOf`)."""
    if isinstance(schema, list):
        return [_without(inner, words, found) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    rest: dict[str, Any] = {}
    for word, value in schema.items():
        if word in words or (word in _BOUNDS and type(value) in (int, float) and not abs(value) < _LARGEST_BOUND):
            found |= {word} if value is not False else set()
        elif word in _INERT:
            rest[word] = value
        elif word in _NAMED and isinstance(value, Mapping):
            rest[word] = {name: _without(inner, words, found) for name, inner in value.items()}
        elif word == "oneOf" and "anyOf" not in schema:
            rest["anyOf"] = _without(value, words, found)
        else:
            rest[word] = _without(value, words, found)
    return rest
