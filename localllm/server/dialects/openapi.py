"""The OpenAPI document. The pydantic models that validate bodies also describe them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import localllm
from localllm.server.dialects.paths import Paths, answer_of

_ERRORS = {
    "400": "the request is invalid or not supported; the message gives the reason",
    "401": "the API key is missing or wrong",
    "403": "Host or Origin is not allowed",
    "404": "unknown model or route",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body's Content-Type is not JSON",
    "500": "the server or a model's worker failed; the message contains no confidential details",
    "501": "the model does not support this request",
    "503": "the server is busy or reloads a model; retry after the time in Retry-After",
}
# Error schemas by the beginning of a path.
_FORMS = {"/v1/messages": "AnthropicError", "/api/": "OllamaError"}
_TEXT = {"type": "string"}
_TEXT_OR_NULL = {"type": ["string", "null"]}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


_ERROR = _object(
    ["message", "type", "code"],
    message=_TEXT,
    type=_TEXT,
    code=_TEXT_OR_NULL,
    param=_TEXT_OR_NULL,
    hint=_TEXT,
    n_prompt_tokens={"type": "integer"},
    n_ctx={"type": "integer"},
)
_ANTHROPIC_ERROR = _object(["type", "message"], type=_TEXT, message=_TEXT)
_ERROR_SCHEMAS: dict[str, Any] = {
    "Error": _object(["error"], error=_ERROR),
    "OllamaError": _object(["error"], error=_TEXT),
    "AnthropicError": _object(
        ["type", "error"], type={"const": "error"}, error=_ANTHROPIC_ERROR, request_id=_TEXT
    ),
}


def _errors_of(path: str) -> dict[str, Any]:
    """Return the error responses of a path, in OpenAI's format or in that of the path's dialect."""
    forms = (form for start, form in _FORMS.items() if path.startswith(start))
    schema = {"$ref": f"#/components/schemas/{next(forms, 'Error')}"}
    content = {"application/json": {"schema": schema}}
    return {code: {"description": text, "content": content} for code, text in _ERRORS.items()}


def body_of(model: type[BaseModel], *keys: str, streams: str = "") -> dict[str, Any]:
    """Return OpenAPI metadata of a route: its body, the keys of a complete answer, and the media
    type of a streamed answer."""
    assert _BODIES.setdefault(model.__name__, model) is model, (
        f"two request bodies are named {model.__name__}"
    )
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    # Without keys: an object, or a list of objects (llama.cpp's format for several choices).
    if keys:
        form = {"type": "object", "required": list(keys)}
    else:
        form = {"type": ["object", "array"]}
    answer: dict[str, Any] = {"application/json": {"schema": form}}
    if streams:
        answer[streams] = {}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {"200": {"description": "the answer", "content": answer}},
    }


def form_of(model: type[BaseModel], file: str, *keys: str, streams: str = "") -> dict[str, Any]:
    """Return OpenAPI metadata of a route that takes a form: the fields of `model` and a `file`."""
    described = body_of(model, *keys, streams=streams)
    fields = described["requestBody"]["content"].pop("application/json")["schema"]
    sent = _object([file], **{file: {"type": "string", "format": "binary"}})
    described["requestBody"]["content"]["multipart/form-data"] = {
        "schema": {"allOf": [fields, sent]}
    }
    described["responses"]["200"]["content"]["text/plain"] = {"schema": _TEXT}
    return described


_BODIES: dict[str, type[BaseModel]] = {}
# Only one thread builds them.
_building = threading.Lock()


def build_bodies() -> None:
    """Build pydantic's validators of the imported dialects in their order, so that the first
    request does not wait for this. Several threads may ask at the same time."""
    with _building:
        for body in [*_BODIES.values()]:
            body.model_rebuild()


def _operation(path: str, method: str, listed: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAPI's operation object for one method of a path."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _TEXT}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += listed.get("parameters", ())
    return {
        **listed,
        "operationId": re.sub(r"\W+", "_", method + path),
        "parameters": parameters,
        "responses": {**_errors_of(path), **listed.get("responses", answer_of())},
    }


def document(dialects: Iterable[Paths]) -> dict[str, Any]:
    """Return the OpenAPI document of the paths in `dialects` and of the bodies given to
    `body_of`."""
    described: dict[str, dict[str, Any]] = {}
    for paths in dialects:
        for (path, method), listed in paths.listed.items():
            shown = path.replace(":path}", "}")
            operation = _operation(shown, method.lower(), listed)
            described.setdefault(shown, {})[method.lower()] = operation
    _, definitions = models_json_schema(
        [(m, "validation") for m in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    about = "Language models on this machine, with the APIs that editors and agents use."
    return {
        "openapi": "3.1.0",
        "info": {"title": "localllm", "description": about, "version": localllm.__version__},
        "paths": described,
        "components": {"schemas": {**definitions["$defs"], **_ERROR_SCHEMAS}},
    }
