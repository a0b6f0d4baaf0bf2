"""The rows of the conformance table: the record, and functions that make the common kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look it up.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    },
}
BARE_TOOL = {"type": "function", "function": {"name": "now"}}
A_TOOL = {"name": "look", "description": "d", "input_schema": TOOL["function"]["parameters"]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# The engine receives the schema in this form: an object allows no other properties.
CLOSED = {**SCHEMA, "additionalProperties": False}


@dataclass(frozen=True)
class Row:
    """One request, and either its `effect` or the status of its refusal.

    `effect(engine's request, JSON reply, response)` must return true, unless `refused` is set.
    """

    name: str
    path: str
    body: Any
    effect: Callable[[Any, Any, httpx.Response], bool] | None = None
    refused: int = 0
    says: str = ""
    script: Any = ("Hello", " world")


def as_said(row: Row, response: httpx.Response, reached: Any) -> bool:
    """Check that `response` matches the row, and raise AssertionError otherwise.

    `reached` is the request that reached the engine, or None.
    """
    if row.refused:
        assert response.status_code == row.refused, response.text
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert row.says.lower() in (message + str(response.json())).lower()
        if not row.path.startswith("/api/") and row.path != ANTH:
            assert set(error) >= {"message", "type", "code", "param"}
        return True
    assert response.status_code == 200, response.text
    assert row.effect is not None
    assert row.effect(reached, response.json(), response), response.text
    return True


def honoured(
    name: str, body: dict[str, Any], effect: Callable[[Any, Any, Any], bool], **more: Any
) -> Row:
    path = more.pop("path", CHAT)
    return Row(name, path, _complete(path, body), effect, **more)


def refused(
    name: str, body: Any, says: str, status: int = 400, path: str = "/v1/chat/completions"
) -> Row:
    return Row(
        name,
        path,
        _complete(path, body) if isinstance(body, dict) else body,
        refused=status,
        says=says,
    )


def sampling(
    field: str, sent: Any, reached: Any, path: str = "/v1/chat/completions", key: str | None = None
) -> Row:
    return honoured(
        f"{key or field}={sent!r}",
        {key or field: sent},
        lambda r, j, h: getattr(r.generation.sampling, field) == reached,
        path=path,
    )


def tolerated(
    name: str, body: dict[str, Any], named: str = "", path: str = "/v1/chat/completions"
) -> Row:
    return honoured(
        name, body, lambda r, j, h: h.headers.get("x-localllm-ignored", "") == named, path=path
    )


def _complete(path: str, body: dict[str, Any]) -> dict[str, Any]:
    base = {
        CHAT: {"messages": HI}, TEXT: {"prompt": "ab"}, RESP: {"input": "hi"},
        ANTH: {"messages": HI, "max_tokens": 500}, OCHAT: {"messages": HI, "stream": False},
        OGEN: {"prompt": "ab", "stream": False}, LCPP: {"prompt": "ab"},
        INFILL: {"input_prefix": "ab", "input_suffix": "cd"}, FIM: {"prompt": "ab"},
    }.get(path, {})  # fmt: skip
    return {**base, **body}


CHAT, TEXT, RESP, ANTH = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OCHAT, OGEN, LCPP, INFILL, FIM = (
    "/api/chat",
    "/api/generate",
    "/completion",
    "/infill",
    "/v1/fim/completions",
)


def text(j: Any) -> str:
    return str(j["choices"][0]["message"]["content"])


def says(part: str) -> Callable[[Any, Any, Any], bool]:
    return lambda r, j, h: part in r.prompt


CALL = ['<tool_call>\n{"name": "look", "argu', 'ments": {"q": "x"}}\n</tool_call>']
