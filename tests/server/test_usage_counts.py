"""`usage` reports reasoning tokens and drafts in every dialect with fields for them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine, grammar_of

THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>{% if "
    "0 "
    "%}<think></think>{% endif %}"
)
OPENED = THINKING + "<think>\n"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(["<think>", "four", " more", "</think>", "done"], chat_template=THINKING)


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with running_server({"m": engine}) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_reasoning_is_counted_in_chat_and_responses(http: httpx.Client) -> None:
    # A token is a byte here, and the model starts in reasoning, so "four more</think>" is counted.
    chat = http.post("/v1/chat/completions", json={"messages": HI}).json()
    details = chat["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == len("four more</think>")
    assert chat["usage"]["completion_tokens"] == len("<think>four more</think>done")
    assert chat["choices"][0]["message"]["reasoning_content"] == "four more"
    responses = http.post("/v1/responses", json={"input": "hi"}).json()
    assert (
        responses["usage"]["output_tokens_details"]["reasoning_tokens"]
        == details["reasoning_tokens"]
    )


def test_several_choices_are_summed_and_the_stream_says_the_same(http: httpx.Client) -> None:
    body = {"messages": HI, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/chat/completions", json=body).text
    assert f'"reasoning_tokens": {2 * len("four more</think>")}' in text


def test_reasoning_before_a_schema_is_counted(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.info = ScriptedEngine(chat_template=OPENED).info
    engine.script = ["four</think>", "{}"]
    body = {"messages": HI, "response_format": {"type": "json_object"}}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"] == {
        "role": "assistant",
        "content": "{}",
        "reasoning_content": "four",
    }
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("four</think>")


def test_an_answer_without_reasoning_has_no_reasoning_tokens(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["hello"]
    reply = http.post("/v1/chat/completions", json={"messages": HI}).json()
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_schema_tools_and_reasoning_work_in_one_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    """Reasoning is unconstrained. Then one grammar allows the schema's answer or a call.

    No text is constrained twice.
    """
    engine.info = ScriptedEngine(chat_template=OPENED).info
    call = '<tool_call>\n{"name": "look", "arguments": {}}'
    engine.script = ["hm</think>", call]
    tool = {"type": "function", "function": {"name": "look"}}
    body = {"messages": HI, "tools": [tool], "response_format": {"type": "json_object"}}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    (request,) = engine.requests
    assert (grammar_of(request) or ("",))[0] == "lark"


def test_a_marker_inside_the_reasoning_opens_no_call(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["<think>", "I could write <tool_call>", " but won't", "</think>", "no"]
    tool = {"type": "function", "function": {"name": "look"}}
    reply = http.post("/v1/chat/completions", json={"messages": HI, "tools": [tool]}).json()
    message = reply["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (
        "no",
        "I could write <tool_call> but won't",
    )
    assert not message.get("tool_calls")
    assert len(engine.requests) == 1


def test_a_plain_chat_is_one_request_without_grammar_or_stops(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    http.post("/v1/chat/completions", json={"messages": HI})
    (request,) = engine.requests
    plain = (None, (), False)
    assert (request.constraint, request.generation.stop, request.render_control) == plain
