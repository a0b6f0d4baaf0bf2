"""Errors have the format that the OpenAPI document declares for their path."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import jsonschema

from localllm.server.app import create_app
from localllm.server.http.settings import ServerSettings
from localllm.server.models.router import ModelRouter
from support.scripted_engine import ScriptedEngine

FORMATS = {"/v1/messages": "AnthropicError", "/api/": "OllamaError", "/v1/": "Error", "/": "Error"}


async def _errors() -> tuple[dict[str, Any], dict[str, httpx.Response]]:
    """Return the document, and each path's reply to a body that is not JSON."""
    app = create_app(ModelRouter({"tiny": ScriptedEngine()}), settings=ServerSettings(port=1))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    replies = {}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        document = (await http.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            if "requestBody" in methods.get("post", {}):
                headers = {"content-type": "application/json"}
                replies[path] = await http.post(path, content=b"{", headers=headers)
    return document, replies


def test_a_refused_body_has_the_documented_format() -> None:
    document, replies = asyncio.run(_errors())
    assert len(replies) > 20
    for path, reply in replies.items():
        assert 400 <= reply.status_code < 500, (path, reply.text)
        responses = document["paths"][path]["post"]["responses"]
        declared = responses[str(reply.status_code)]["content"]["application/json"]["schema"]
        name = declared["$ref"].rpartition("/")[2]
        expected = next(form for start, form in FORMATS.items() if path.startswith(start))
        assert name == expected, path
        schema = document["components"]["schemas"][name]
        jsonschema.validate(reply.json(), schema)
        # The required fields of each format distinguish it from the others.
        others = {form for form in FORMATS.values() if form != name}
        for other in others:
            validator = jsonschema.Draft202012Validator(document["components"]["schemas"][other])
            assert not validator.is_valid(reply.json()), (path, other)


def test_the_first_requests_of_a_server_may_come_at_once() -> None:
    """The first requests of a server may come at the same time.

    The dialects are imported on first use, in a thread.
    """
    paths = ["/v1/models", "/api/tags", "/v1/models", "/slots", "/health", "/api/tags"]

    async def asked() -> list[int]:
        app = create_app(ModelRouter({"tiny": ScriptedEngine()}), settings=ServerSettings(port=1))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            answers = await asyncio.gather(*(http.get(path) for path in paths))
        return [answer.status_code for answer in answers]

    assert asyncio.run(asked()) == [200] * len(paths)
