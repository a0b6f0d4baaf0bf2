"""`x-localllm-ignored` names the client's own fields, and only those without effect.

Other tests cover the ids of requests, the echo of a prompt with a suffix, and the tokens of a
forced call.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPENED = TURNS + "<think>\n{# </think> #}"
USER = [{"role": "user", "content": "hi"}]
CHAT, MESSAGES, RESPONSES, OLLAMA = (
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/api/chat",
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LOOSE = {"type": "json_schema", "schema": {"type": "object", "not": {}}, "strict": False}


def post(template: str, path: str, body: dict[str, Any]) -> tuple[httpx.Response, ScriptedEngine]:
    engine = ScriptedEngine(chat_template=template)
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + path, json=body, trust_env=False, timeout=60)
    return reply, engine


def named(template: str, path: str, body: dict[str, Any]) -> list[str]:
    sent = {"input": "hi"} if path == RESPONSES else {"messages": USER}
    if path == MESSAGES:
        sent["max_tokens"] = 9
    reply, _ = post(template, path, {**sent, **body})
    assert reply.status_code == 200, reply.text
    return [name for name in reply.headers.get("x-localllm-ignored", "").split(",") if name]


@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_a_variable_that_switches_the_reasoning_off_is_not_named(variable: str) -> None:
    body = {"chat_template_kwargs": {variable: False}}
    assert named(OPENED, CHAT, body) == []
    assert named(TURNS, CHAT, body) == [f"chat_template_kwargs.{variable}"]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"think": True}, "think"),
        (CHAT, {"enable_thinking": True}, "enable_thinking"),
        (CHAT, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget"),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking.type"),
        (MESSAGES, {"output_config": {"effort": "high"}}, "output_config.effort"),
        (OLLAMA, {"think": "high", "stream": False}, "think"),
        (OLLAMA, {"options": {"thinking_budget": 5}, "stream": False}, "options.thinking_budget"),
        (CHAT, {"response_format": LOOSE}, "response_format.not"),
        (RESPONSES, {"text": {"format": LOOSE}}, "text.format.not"),
        (MESSAGES, {"output_config": {"format": LOOSE}}, "output_config.format.not"),
        (
            CHAT,
            {"tools": TOOLS, "tool_choice": "required", "json_schema": {"type": "object"}},
            "json_schema",
        ),
        (
            RESPONSES,
            {"include": ["reasoning.encrypted_content"]},
            "include.reasoning.encrypted_content",
        ),
        (MESSAGES, {"thinking": {"type": "enabled", "display": "updates"}}, "thinking.display"),
    ],
    ids=str,
)
def test_a_field_without_effect_is_named_as_the_client_sent_it(
    path: str, body: dict[str, Any], field: str
) -> None:
    names = named(TURNS, path, body)
    assert field in names
    assert all(name.split(".")[0] in body for name in names), names


def test_the_limit_of_a_preset_is_not_named() -> None:
    from localllm.server.models.router import ServedModel
    from localllm.server.models.served import ModelDefaults

    model = ServedModel("m", ScriptedEngine(chat_template=TURNS))
    model.defaults = ModelDefaults(thinking_tokens=9)
    with running_server([model]) as server:
        reply = httpx.post(server.url + CHAT, json={"messages": USER}, trust_env=False, timeout=60)
    assert "x-localllm-ignored" not in reply.headers


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_a_suffix_is_the_text_of_the_prompt(stream: bool) -> None:
    engine = ScriptedEngine(["x"], fim_tokens={"pre": 1, "suf": 2, "mid": 3})
    body = {"prompt": "def f(", "suffix": ")", "echo": True, "n": 2, "stream": stream}
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + "/v1/completions", json=body, trust_env=False, timeout=60)
    if stream:
        assert reply.text.count('"text":"def f("') == 2
    else:
        assert [c["text"] for c in reply.json()["choices"]] == ["def f(x"] * 2


def test_counting_includes_the_beginning_of_a_forced_call() -> None:
    body = {
        "messages": USER,
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
    }
    counted, _ = post(TURNS, MESSAGES + "/count_tokens", body)
    reply, _ = post(TURNS, MESSAGES, {**body, "max_tokens": 9})
    usage = reply.json()["usage"]
    spent = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json()["input_tokens"] == spent


def test_every_answer_of_messages_has_an_id() -> None:
    good = {"messages": USER, "max_tokens": 9}
    for body in (good, {**good, "stream": True}, {"messages": 5}):
        reply, _ = post(TURNS, MESSAGES, body)
        assert reply.headers["request-id"].startswith("req_")
        assert reply.headers["x-request-id"] == reply.headers["request-id"]
        if reply.status_code == 400:
            assert reply.json()["request_id"] == reply.headers["request-id"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_within_the_reasoning_does_not_replace_a_required_one(stream: bool) -> None:
    """A call inside the reasoning does not replace a required call.

    Here a thinking budget ends the reasoning in the middle of a call that the model had begun.
    """
    engine = ScriptedEngine(
        ["<tool_call>\n{\n", "</think>", "\n\n<tool_call>\n", '{"name": "f", "arguments": ', "{}"],
        chat_template=OPENED,
    )
    body = {"messages": USER, "tools": TOOLS, "tool_choice": "required", "stream": stream}
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + CHAT, json=body, trust_env=False, timeout=60)
    if stream:
        assert '"finish_reason":"tool_calls"' in reply.text
        assert '"content":"<' not in reply.text
        return
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "<tool_call>\n{"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
