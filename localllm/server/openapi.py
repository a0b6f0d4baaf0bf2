"""The OpenAPI document: request bodies are described by the very models that check them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_ERRORS = {
    code: {"description": text, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for code, text in {
        "400": "the request can't be honoured; the message says why",
        "403": "Host or Origin refused",
        "404": "unknown model or route",
        "413": "the body is too large",
        "415": "the body is not sent as JSON",
        "503": "busy or reloading; Retry-After says when to try again",
    }.items()
}
_ERROR_SCHEMA = {
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
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Route metadata: a required JSON body of that form, and the errors every route may answer."""
    _BODIES[model.__name__] = model
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}, "responses": _ERRORS}


_BODIES: dict[str, type[BaseModel]] = {}


def install(app: FastAPI) -> None:
    """Make `app.openapi()` include the bodies named by `body_of`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema(
                [(m, "validation") for m in _BODIES.values()], ref_template="#/components/schemas/{model}"
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"], Error=_ERROR_SCHEMA)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
