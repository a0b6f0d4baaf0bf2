"""The OpenAPI document: bodies are described by the pydantic models that validate them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ERRORS = {
    "400": "the request can't be honoured; the message says why",
    "401": "the API key is missing or wrong",
    "403": "Host or Origin refused",
    "404": "unknown model or route",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not sent as JSON",
    "500": "the server or a model's worker failed; the message says as much as is safe",
    "503": "busy or reloading; Retry-After says when to try again",
}
_ERROR_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "code": {"type": ["string", "null"]},
                    "param": {"type": ["string", "null"]},
                    "hint": {"type": "string"},
                },
            }
        },
    },
    "OllamaError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "string"}},
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}


def _errors_of(path: str) -> dict[str, Any]:
    """The error responses of any route: in its dialect's format, or in OpenAI's from the gate."""
    forms = ["Error"]
    if path.startswith("/v1/messages"):
        forms.append("AnthropicError")
    elif path.startswith("/api/"):
        forms.append("OllamaError")
    schema = {"anyOf": [{"$ref": f"#/components/schemas/{form}"} for form in forms]}
    content = {"application/json": {"schema": schema}}
    more = {"501": "the model can't do that at all"} if path.startswith("/v1/systemone") else {}
    return {
        code: {"description": text, "content": content} for code, text in (_ERRORS | more).items()
    }


def body_of(model: type[BaseModel], *keys: str, streams: str = "") -> dict[str, Any]:
    """OpenAPI metadata of a route: its body, the keys of a whole answer, and the media type of a
    streamed one."""
    assert _BODIES.setdefault(model.__name__, model) is model, (
        f"two bodies are named {model.__name__}"
    )
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    # Without keys: an object, or a list of them (llama.cpp's several choices).
    form = {"type": "object", "required": list(keys)} if keys else {"type": ["object", "array"]}
    answer: dict[str, Any] = {"application/json": {"schema": form}}
    if streams:
        answer[streams] = {}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "the answer", "content": answer}},
    }


_BODIES: dict[str, type[BaseModel]] = {}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` include the bodies that `body_of` names."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, definitions = models_json_schema(
                [(m, "validation") for m in _BODIES.values()],
                ref_template="#/components/schemas/{model}",
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"], **_ERROR_SCHEMAS)
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    # FastAPI's own: our bodies are checked by fields.read
                    operation["responses"].pop("422", None)
                    operation["responses"] |= _errors_of(path)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
