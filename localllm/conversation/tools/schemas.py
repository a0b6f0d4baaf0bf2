"""Tools' JSON schemas: their parameters, what of them a grammar can enforce, and the schemas of calls that are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from localllm.conversation.tools.base import Grammar, NamedSchemas, Tool, parameters_of

# Words of a schema that say something about the arguments as a whole.
_BEYOND = frozenset(
    {
        "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    }
)  # fmt: skip


_KINDS: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null",
}  # fmt: skip
# References that lead to references, and alternatives within alternatives.
_MOST_REFERENCES = 8


def parameters(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and schema of every parameter, and whether it must be there."""
    properties, required = schema.get("properties"), schema.get("required")
    wanted = set(required) if isinstance(required, list) else set()
    return [(k, v, k in wanted) for k, v in (properties.items() if isinstance(properties, Mapping) else ())]


def names_all(schema: Mapping[str, Any]) -> bool:
    """True when the arguments are no more than `parameters`: none must be there that it does not describe, nor do they
    depend on one another, and a schema that describes none wants none."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if _BEYOND & set(schema) or not isinstance(required, list):
        return False
    if not isinstance(properties, Mapping):
        return not required and (not schema or schema.get("additionalProperties") is False)
    return set(required) <= set(properties)


def resolved(described: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`described`, or what it refers to within `root`; None where that leads nowhere."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(described, Mapping):
            return None
        reference = described.get("$ref")
        if reference is None:
            return described
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        described = root
        for part in reference[2:].split("/"):
            described = (
                described.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(described, Mapping) else None
            )
    return None


def options_of(described: Any, root: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]] | None:
    """The schemas of which a value matches one, none of them a reference, an alternative or of several types. None for
    a schema that says nothing, or what can't be taken apart."""
    described = resolved(described, root)
    if described is None or depth > _MOST_REFERENCES:
        return None
    constant = constants_of(described)
    if constant is not None:
        return [{"const": value} for value in constant]
    either = described.get("anyOf") or described.get("oneOf")
    if isinstance(either, list) and either:
        found = [options_of(e, root, depth + 1) for e in either]
        return [o for some in found for o in some or ()] if all(some is not None for some in found) else None
    kind = described.get("type")
    if isinstance(kind, str):
        return [described]
    if isinstance(kind, list) and kind:
        return [{**described, "type": k} for k in kind]
    for word, implied in (("properties", "object"), ("items", "array")):
        if word in described:
            return [{**described, "type": implied}]
    return None


def constants_of(described: Mapping[str, Any]) -> list[Any] | None:
    """The values that an enumeration or a constant allows; None for any other schema."""
    options = [described["const"]] if "const" in described else described.get("enum")
    return options if isinstance(options, list) and options else None


def kinds_of(described: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types of the values a schema allows; empty where it does not say."""
    options = options_of(described, root) or ()
    return {kind_of(o["const"]) if "const" in o else str(o["type"]) for o in options}


def kind_of(value: Any) -> str:
    return _KINDS.get(type(value), "object")


def arguments(schema: Mapping[str, Any]) -> Grammar:
    return "json_schema", json.dumps(as_object(schema))


def one_call(tools: NamedSchemas, key: str = "arguments") -> Grammar:
    return "json_schema", json.dumps(any_call(tools, key))


def call_list(tools: NamedSchemas, more: Mapping[str, Any] | None = None) -> Grammar:
    """A JSON array of calls. `more`: what may stand behind the arguments."""
    call = any_call(tools, "arguments", more)
    schema = {"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, "$defs": call["$defs"]}
    return "json_schema", json.dumps(schema)


def any_call(tools: NamedSchemas, key: str, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON schema of a call of one of `tools`, with the arguments under `key`.

    The parameters move into this schema, so their references to themselves (`#/$defs/…`) are turned to where they are
    now."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/tool{i}"}, **(more or {})},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for i, (name, _) in enumerate(tools)
        ],
        "$defs": moved(tools),
    }


def moved(tools: NamedSchemas) -> dict[str, Any]:
    """The parameters of `tools` as definitions tool0, tool1, … of another schema."""
    return {f"tool{i}": _moved(as_object(schema), f"#/$defs/tool{i}") for i, (_, schema) in enumerate(tools)}


def _moved(schema: Any, to: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            k: to + v[1:] if k == "$ref" and isinstance(v, str) and v.startswith("#") else _moved(v, to)
            for k, v in schema.items()
        }
    return [_moved(v, to) for v in schema] if isinstance(schema, list) else schema


def as_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` as one of an object: arguments always are one, and editors leave the type out."""
    return {"type": "object", **schema} if schema else {"type": "object", "properties": {}}


# --- what a grammar can keep: the rest is left out and named, so that one word nobody can constrain costs nothing else

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
