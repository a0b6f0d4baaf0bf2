"""What a tool's JSON schema says of its parameters, and the schemas of calls that are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from localllm.conversation.tools.base import Grammar, Named

# Words of a schema that say something about the arguments as a whole.
_BEYOND = frozenset(
    {
        "$ref", "allOf", "anyOf", "oneOf", "not", "if", "patternProperties", "propertyNames", "minProperties",
        "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    }
)  # fmt: skip


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


def words_of(described: Any) -> list[str] | None:
    """The texts an enumeration of texts (or a constant one) allows; None for any other schema."""
    if not isinstance(described, Mapping):
        return None
    options = [described["const"]] if "const" in described else described.get("enum")
    return options if isinstance(options, list) and options and all(isinstance(o, str) for o in options) else None


def is_text(described: Any) -> bool:
    """True for a schema that wants text, or says nothing."""
    if not isinstance(described, Mapping):
        return True
    kind = described.get("type")
    if kind is None:
        return not {"anyOf", "oneOf", "allOf", "$ref", "const", "enum"} & set(described)
    return kind == "string" or (isinstance(kind, list) and "string" in kind)


def arguments(schema: Mapping[str, Any]) -> Grammar:
    """The arguments alone, as JSON."""
    return "json_schema", json.dumps(as_object(schema))


def one_call(tools: Named, key: str = "arguments") -> Grammar:
    """One call as JSON."""
    return "json_schema", json.dumps(any_call(tools, key))


def call_list(tools: Named) -> Grammar:
    """A JSON array of calls."""
    call = any_call(tools, "arguments")
    schema = {"type": "array", "items": {"anyOf": call["anyOf"]}, "minItems": 1, "$defs": call["$defs"]}
    return "json_schema", json.dumps(schema)


def any_call(tools: Named, key: str) -> dict[str, Any]:
    """The JSON schema of a call of one of `tools`, with the arguments under `key`.

    The parameters move into this schema, so their references to themselves (`#/$defs/…`) are turned to where they are
    now."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/tool{i}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
            for i, (name, _) in enumerate(tools)
        ],
        "$defs": {f"tool{i}": _moved(as_object(schema), f"#/$defs/tool{i}") for i, (_, schema) in enumerate(tools)},
    }


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
