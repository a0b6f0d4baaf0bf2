"""`max_tokens` above the rest of the context is a limit, never an error.

This also holds if the server itself adds text to the answer: the lead of a call, a forced call,
or the end of the reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
FUNCTION = {"name": "write", "parameters": SCHEMA}
MESSAGES = [{"role": "user", "content": "Write."}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if enable_thinking %}<think>\n{% else %}{# </think> #}{% endif %}"
)
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "hi"}}\n</tool_call>'
MOST = 32_000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "max_tokens": MOST,
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses": {
        "input": "Write.",
        "max_output_tokens": MOST,
        "tools": [{"type": "function", **FUNCTION}],
    },
    "/v1/messages": {
        "messages": MESSAGES,
        "max_tokens": MOST,
        "tools": [{"name": "write", "input_schema": SCHEMA}],
    },
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("said", ["", "I write it.\n"])
def test_a_call_after_text_is_limited_by_the_context(path: str, said: str) -> None:
    engine = ScriptedEngine([said, CALL], chat_template=TEMPLATE)
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + path, json=BODIES[path], trust_env=False)
    assert reply.status_code == 200, reply.text
    assert "write" in reply.text


def test_an_answer_after_reasoning_is_limited_by_the_context() -> None:
    engine = ScriptedEngine(["So.</think>", '{"text": "hi"}'], chat_template=TEMPLATE)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = {
        "messages": MESSAGES,
        "max_tokens": MOST,
        "response_format": form,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + "/v1/chat/completions", json=asked, trust_env=False)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == '{"text": "hi"}'
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    "room", [1, 5, 10, 11, 12, 13, 14, 30, len(CALL) - 13, len(CALL) - 12, len(CALL), len(CALL) + 2]
)
def test_a_window_that_ends_in_the_middle_cuts_the_answer(room: int) -> None:
    """The context may end at any place, in the lead of the call or in a word."""
    prompt = "Write.<tool_call>"
    engine = ScriptedEngine([CALL], chat_template=TEMPLATE, n_ctx=len(prompt) + room)
    body = BODIES["/v1/chat/completions"]
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + "/v1/chat/completions", json=body, trust_env=False)
    assert reply.status_code == 200, reply.text
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] in ("length", "tool_calls")
    if choice["finish_reason"] == "tool_calls":
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"text": "hi"}'


@pytest.fixture(scope="module")
def http(smollm2: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=512, n_seq_max=1)))
    with (
        running_server({"smollm2": host}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_real_model_is_limited_by_the_context(
    http: httpx.Client, choice: str, stream: bool
) -> None:
    number = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    call = {"name": "count", "arguments": '{"n": 1}'}
    said = [
        {"role": "user", "content": "Count to 1."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": call}],
        },
        {"role": "user", "content": "Count to 2."},
    ]
    body = {
        "messages": said, "temperature": 0, "max_tokens": MOST, "tool_choice": choice,
        "stream": stream,
        "tools": [{"type": "function", "function": {"name": "count", "parameters": number}}],
    }  # fmt: skip
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert "context_length_exceeded" not in reply.text
    if not stream:
        (first, *_) = reply.json()["choices"][0]["message"]["tool_calls"]
        assert set(json.loads(first["function"]["arguments"])) == {"n"}
