"""What a client may say about the form of an answer, as the one constraint the engine enforces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from localllm.errors import RequestError, UnsupportedError

# ("json_schema" | "gbnf", source), as `engine.messages.Request.grammar` takes it.
Constraint: TypeAlias = tuple[str, str]


def only_one(**named: Constraint | None) -> Constraint | None:
    """The one constraint among those a body gives by these names; raises RequestError when it gives several."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        names = list(given)
        raise RequestError(f"{' and '.join(names)} can't be combined: send one", param=names[1])
    return next(iter(given.values()), None)


def of_schema(schema: Mapping[str, Any] | None) -> Constraint | None:
    """The constraint of a JSON schema; None for none."""
    return None if schema is None else ("json_schema", json.dumps(schema))


def of_response_format(response_format: Any) -> Constraint | None:
    """The engine's constraint for OpenAI's `response_format`; raises RequestError or UnsupportedError."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise RequestError("the response format must be an object with a type", param="response_format")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's spelling puts a schema beside json_object.
        schema = response_format.get("schema")
        return of_schema(schema if isinstance(schema, dict) else {"type": "object"})
    if kind == "json_schema":
        wrapped = response_format.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else response_format.get("schema")
        if not isinstance(schema, Mapping):
            raise RequestError(
                "response_format.json_schema.schema must be an object", param="response_format.json_schema"
            )
        return of_schema(schema)
    raise UnsupportedError(
        f"response_format.type {str(kind)[:40]!r} is not supported; known: text, json_object, json_schema",
        param="response_format",
    )
