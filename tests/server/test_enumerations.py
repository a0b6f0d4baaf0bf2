"""An unknown value in any enumeration of a request body.

It is accepted and named if it changes nothing. Otherwise the reply is a 400 that lists the known
values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest

from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.known import Shape, Unused, shape_of
from localllm.server.dialects.llamacpp.completion import LlamaCppFields
from localllm.server.dialects.ollama.requests import OllamaChat, OllamaGenerate
from localllm.server.dialects.openai.chat import ChatFields
from localllm.server.dialects.openai.completions import CompletionFields
from localllm.server.dialects.responses.items import ResponsesFields
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatFields, {"messages": USER}),
    "/v1/completions": (CompletionFields, {"prompt": "hi"}),
    "/v1/responses": (ResponsesFields, {"input": "hi"}),
    "/v1/messages": (MessagesFields, {"messages": USER, "max_tokens": 4}),
    "/api/chat": (OllamaChat, {"messages": USER, "stream": False}),
    "/api/generate": (OllamaGenerate, {"prompt": "hi", "stream": False}),
    "/completion": (LlamaCppFields, {"prompt": "hi"}),
}
NEW = "brand-new"
# Fields that an enumeration needs around it, so that its object is read.
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a"}
CUSTOM = {"type": "custom", "name": "f", "format": GRAMMAR}
CALL_ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}


def enumerations(kind: Any, known: Shape | None, path: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each enumeration in a body, and its known values."""
    fields = getattr(kind, "model_fields", {})
    for name, fate in (known or {}).items():
        where = f"{path}.{name}" if path else name
        values: list[str] = []
        if isinstance(fate, Unused):
            values = [v for v in fate.off if isinstance(v, str) and v]
        elif name in fields:
            values = literals(fields[name].annotation)
        if values:
            yield where, values
        if isinstance(fate, dict) and where.count(".") < 2:
            yield from enumerations(inner_kind(fields.get(name)), fate, where)


def literals(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [v for v in get_args(annotation) if isinstance(v, str) and v]
    found: list[str] = []
    for part in get_args(annotation):
        found += literals(part)
    return found


def inner_kind(field: Any) -> Any:
    if field is None:
        return None
    kinds = [field.annotation, *get_args(field.annotation)]
    return next((kind for kind in kinds if hasattr(kind, "model_fields")), None)


def with_value(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return `body` with `value` at `path`. In an existing list, the first entry is changed."""
    made = copy.deepcopy(body)
    at: Any = made
    *outer, last = path.split(".")
    for name in outer:
        if isinstance(at, list):
            at = at[0]
        if not isinstance(at.get(name), dict | list):
            at[name] = {}
        at = at[name]
    if isinstance(at, list):
        at = at[0]
    at[last] = value
    return made


def cases() -> list[tuple[str, str, list[str]]]:
    found = []
    for url, (kind, _) in BODIES.items():
        for path, values in enumerations(kind, shape_of(kind)):
            first = path.partition(".")[0]
            if first in ("messages", "tools", "input", "system", "tool_choice", "prediction"):
                continue  # the bodies below cover it
            found.append((url, path, values))
    return found


CASES = cases()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    think = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}"
    think += "{# <think></think> #}"
    with running_server({"m": ScriptedEngine(chat_template=think)}) as running:
        yield running


def checked(server: Running, url: str, body: dict[str, Any], path: str, values: list[str]) -> None:
    reply = httpx.post(server.url + url, json=body, trust_env=False, timeout=60)
    if reply.status_code == 200:
        named = reply.headers.get("x-localllm-ignored", "").split(",")
        assert path in named, (path, named)
    else:
        assert reply.status_code == 400, reply.text
        assert all(value in reply.text for value in values), reply.text


def test_there_are_enumerations_to_try() -> None:
    paths = {path for _, path, _ in CASES}
    assert {"thinking.display", "reasoning_effort", "service_tier", "truncation"} <= paths
    assert {"reasoning.summary", "text.verbosity", "output_config.effort", "verbosity"} <= paths


@pytest.mark.parametrize(("url", "path", "values"), CASES, ids=[f"{u} {p}" for u, p, _ in CASES])
def test_an_unknown_value_is_named_or_refused_with_the_known_ones(
    server: Running, url: str, path: str, values: list[str]
) -> None:
    around = BODIES[url][1]
    if path == "thinking.display":
        around = {**around, "thinking": {"type": "enabled"}}
    if path.startswith("response_format.json_schema"):
        pytest.skip("a description, not an enumeration")
    if path.startswith("context_management.edits"):
        pytest.skip("in a list: see NESTED")
    checked(server, url, with_value(around, path, NEW), path, values)
    for value in values:
        body = with_value(around, path, value)
        reply = httpx.post(server.url + url, json=body, trust_env=False, timeout=60)
        assert path not in reply.headers.get("x-localllm-ignored", "").split(","), value


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NESTED: list[tuple[str, dict[str, Any], str, list[str]]] = [
    (CHAT, {"messages": [{"role": NEW, "content": "x"}]}, "", ["system", "user", "assistant", "tool"]),
    (MESSAGES, {"messages": [{"role": NEW, "content": "x"}]}, "", ["user", "assistant"]),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": NEW}, "", ["auto", "required"]),
    (CHAT, {"messages": USER, "tools": [TOOL], "tool_choice": {"type": NEW}}, "", ["function"]),
    (MESSAGES, {"messages": USER, "tool_choice": {"type": NEW}}, "", ["auto", "any", "tool"]),
    (MESSAGES, {"messages": USER, "context_management": {"edits": [{"type": "x", "keep": NEW}]}}, "", ["all"]),
    (CHAT, {"messages": USER, "response_format": {"type": NEW}}, "", ["text", "json_schema"]),
    (RESPONSES, {"input": "x", "text": {"format": {"type": NEW}}}, "", ["text", "json_schema"]),
    (RESPONSES, {"input": "x", "include": [NEW]}, f"include.{NEW}", []),
    (RESPONSES, {"input": [{**CALL_ITEM, "status": NEW}]}, "input.status", []),
    (RESPONSES, {"input": "x", "tools": [{"type": NEW}]}, f"tools.{NEW}", []),
    (MESSAGES, {"messages": USER, "system": [{"type": "text", "text": "x", "cache_control": {"ttl": NEW}}]},
     "system.cache_control.ttl", []),
    (CHAT, {"messages": USER, "tools": [{**CUSTOM, "format": {**GRAMMAR, "syntax": NEW}}]}, "", ["lark", "regex"]),
    (CHAT, {"messages": USER, "prediction": {"type": NEW, "content": "x"}}, "", ["content"]),
    (CHAT, {"messages": USER, "modalities": [NEW]}, "", ["text"]),
    ("/v1/embeddings", {"input": "x", "encoding_format": NEW}, "", ["float", "base64"]),
    ("/api/chat", {"messages": USER, "format": NEW}, "", ["json"]),
]  # fmt: skip


@pytest.mark.parametrize(("url", "body", "path", "values"), NESTED, ids=range(len(NESTED)))
def test_unknown_values_in_messages_and_tools_are_named_or_refused(
    server: Running, url: str, body: dict[str, Any], path: str, values: list[str]
) -> None:
    sent = {"max_tokens": 4, **body} if url == MESSAGES else body
    checked(server, url, sent, path, values)
