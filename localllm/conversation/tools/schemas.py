"""Tools' JSON schemas: their parameters, and the parts that a grammar can enforce."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.conversation.tools.base import Grammar, NamedSchemas, Tool, parameters_of
from localllm.errors import UnsupportedError
from localllm.grammars.closed_objects import pointed_to
from localllm.grammars.json_schema import LENIENT, documents
from localllm.grammars.loosening import loosened
from localllm.grammars.schema_words import NOT_COMPARED

# Keywords that apply to the arguments as a whole.
_WHOLE_OBJECT_WORDS = frozenset(
    {
        "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames",
        "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    }
)  # fmt: skip


_TYPE_NAMES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
    type(None): "null",
}  # fmt: skip
# Maximum depth of references to references and of nested alternatives.
_MAX_REFERENCES = 8


def parameters(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Name and schema of every parameter, and whether it is required."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return []
    required = schema.get("required")
    required_names = set(required) if isinstance(required, list) else set()
    return [(name, described, name in required_names) for name, described in properties.items()]


def names_all(schema: Mapping[str, Any]) -> bool:
    """True if `parameters` describes the arguments completely.

    That is, every required parameter is described, and parameters do not depend on one another. A
    schema without properties must be empty or exclude further ones.
    """
    properties = schema.get("properties")
    required = schema.get("required", [])
    if _WHOLE_OBJECT_WORDS & set(schema) or not isinstance(required, list):
        return False
    if not isinstance(properties, Mapping):
        return not required and (not schema or schema.get("additionalProperties") is False)
    return set(required) <= set(properties)


def resolved(described: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`described`, or the schema that it refers to within `root`. None for a broken reference."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(described, Mapping):
            return None
        reference = described.get("$ref")
        if reference is None:
            return described
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        described = pointed_to(reference[2:], root)
    return None


def options_of(
    described: Any, root: Mapping[str, Any], depth: int = 0
) -> list[Mapping[str, Any]] | None:
    """Alternative schemas of a value, without references, nested alternatives or multiple types.

    None if the schema states no type or can't be split up.
    """
    described = resolved(described, root)
    if described is None or depth > _MAX_REFERENCES:
        return None
    if "const" in described:
        return [{"const": described["const"]}]
    constants = described.get("enum")
    if isinstance(constants, list) and constants:
        return [{"const": value} for value in constants]
    alternatives = described.get("anyOf") or described.get("oneOf")
    if isinstance(alternatives, list) and alternatives:
        return _options_of_any(alternatives, root, depth + 1)
    kinds = _stated_kinds(described)
    if kinds:
        return [{**described, "type": kind} for kind in kinds]
    return None


def _options_of_any(
    alternatives: list[Any], root: Mapping[str, Any], depth: int
) -> list[Mapping[str, Any]] | None:
    all_options: list[Mapping[str, Any]] = []
    for alternative in alternatives:
        options = options_of(alternative, root, depth)
        if options is None:
            return None
        all_options += options
    return all_options


def _stated_kinds(described: Mapping[str, Any]) -> list[Any]:
    """The types that a schema states, or implies by a keyword of one type. Empty if unknown."""
    kind = described.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return kind
    implied = {"properties": "object", "items": "array"}
    return [kind for word, kind in implied.items() if word in described][:1]


def kinds_of(described: Any, root: Mapping[str, Any]) -> set[str]:
    """The JSON types of the values that a schema allows. Empty if unknown."""
    return {kind_of_option(option) for option in options_of(described, root) or ()}


def kind_of_option(option: Mapping[str, Any]) -> str:
    """The JSON type of the values that one of `options_of` allows."""
    if "const" in option:
        return kind_of(option["const"])
    return str(option["type"])


def kind_of(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "object")


def arguments(schema: Mapping[str, Any]) -> Grammar:
    return "json_schema", json.dumps(as_object(schema))


def one_call(tools: NamedSchemas, key: str = "arguments") -> Grammar:
    return "json_schema", json.dumps(any_call(tools, key))


def call_list(tools: NamedSchemas, further_properties: Mapping[str, Any] | None = None) -> Grammar:
    """A JSON array of calls. `further_properties` has the properties that may follow the
    arguments."""

    def call(name: str, schema: Any) -> dict[str, Any]:
        return call_object(name, "arguments", schema, further_properties)

    return array_of(tools, call)


def array_of(tools: NamedSchemas, call: Callable[[str, Any], dict[str, Any]]) -> Grammar:
    """A JSON array of calls. `call` returns a call's schema for a name and an arguments schema."""
    alternatives = any_of_tools(tools, call)
    schema = {
        "type": "array",
        "items": {"anyOf": alternatives.pop("anyOf")},
        "minItems": 1,
        **alternatives,
    }
    return "json_schema", json.dumps(schema)


def any_call(tools: NamedSchemas, key: str) -> dict[str, Any]:
    """The JSON schema of a call of one of `tools`, with the arguments under `key`."""

    def call(name: str, schema: Any) -> dict[str, Any]:
        return call_object(name, key, schema)

    return any_of_tools(tools, call)


def call_object(
    name: str, key: str, schema: Any, further_properties: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: schema, **(further_properties or {})},
        "required": ["name", key],
        "additionalProperties": False,
    }


def any_of_tools(tools: NamedSchemas, call: Callable[[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """The alternative of the schemas that `call` makes for `tools`."""
    return {
        "anyOf": [call(name, {"$ref": f"tool{i}"}) for i, (name, _) in enumerate(tools)],
        **documents({f"tool{i}": as_object(schema) for i, (_, schema) in enumerate(tools)}),
        # `constrainable` has already named the parts that llguidance does not enforce.
        **LENIENT,
    }


def as_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with type object: arguments are always an object, and editors often omit the
    type."""
    if schema:
        return {"type": "object", **schema}
    return {"type": "object", "properties": {}}


def constrainable(tools: Sequence[Tool]) -> tuple[list[Tool], tuple[str, ...]]:
    """`tools` with schemas that a grammar can enforce, and the keywords that it can't.

    Those keywords are left out or weakened, and are named as tools.NAME.WORD. Raises
    UnsupportedError for a `strict` tool that can't be enforced.
    """
    constrained: list[Tool] = []
    unsupported: list[str] = []
    for tool in tools:
        name, schema = parameters_of(tool)
        enforced: Any
        try:
            enforced, words = loosened(as_object(schema))
        except UnsupportedError:  # too much work
            enforced = True
            words = ("schema",)
        if isinstance(enforced, dict) and "object" not in enforced.get("type", "object"):
            enforced = True
            words = (*words, "schema")
        if set(words) - NOT_COMPARED and tool.get("strict"):
            raise UnsupportedError(
                f"the parameters of the strict tool {name[:60]!r} can't be enforced: "
                f"{', '.join(words)}",
                hint="omit strict: then the other keywords of the schema are enforced",
                param="tools",
            )
        for word in words:
            label = "parameters" if word == "schema" else word
            unsupported.append(f"tools.{name}.{label}")
        if not isinstance(enforced, dict):
            enforced = {}
        enforced = {**enforced, "type": "object"}
        constrained.append(
            {"type": "function", "function": {**tool["function"], "parameters": enforced}}
        )
    return constrained, tuple(unsupported)
