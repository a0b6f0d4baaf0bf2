"""The vendors' own clients in strict mode, over every path that they use.

This mode rejects an answer that does not match the client's types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from localllm.engine.messages import Request
from server.test_thinking_budget import OWN
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
CHAT_TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
TOOL: Any = {"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}


def _script(request: Request) -> list[str]:
    """Write reasoning and an answer, and a call if the request has tools."""
    said = ["<think>hm</think>", "Hello", " world"]
    return [*said, CALL] if "look" in str(request.prompt) else said


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = ScriptedEngine(_script, chat_template=OWN)
    with running_server({"tiny": engine}) as server:
        yield server


@pytest.fixture
def client(running: Running) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=running.url + "/v1", api_key="x", max_retries=0, _strict_response_validation=True
    )


@pytest.fixture
def claude(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(
        base_url=running.url, api_key="x", max_retries=0, _strict_response_validation=True
    )


@pytest.mark.parametrize(
    "more",
    [
        {}, {"n": 2, "seed": 1}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 3},
        {"tools": [CHAT_TOOL]}, {"reasoning_effort": "none"}, {"service_tier": "flex"},
    ],
    ids=str,
)  # fmt: skip
def test_openais_client_reads_chats_in_strict_mode(
    client: openai.OpenAI, more: dict[str, Any]
) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HI, **more)
    assert whole.choices[0].finish_reason in ("stop", "tool_calls", "length")
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, **more
        )
    )
    assert chunks[-1].usage is not None


def test_openais_client_reads_completions_and_lists_in_strict_mode(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="a", logprobs=2).choices[0].text
    # Its type does not allow the null that OpenAI's own stream has until the end.
    loose = openai.OpenAI(base_url=client.base_url, api_key="x", max_retries=0)
    assert list(loose.completions.create(model="tiny", prompt="a", stream=True))
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


@pytest.mark.parametrize(
    "more",
    [
        {}, {"tools": [TOOL]}, {"max_output_tokens": 20}, {"reasoning": {"summary": "auto"}},
        {"tools": [{"type": "custom", "name": "look"}]},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"truncation": "auto", "metadata": {"a": "b"}, "service_tier": "priority"},
    ],
    ids=str,
)  # fmt: skip
def test_openais_client_reads_responses_in_strict_mode(
    client: openai.OpenAI, more: dict[str, Any]
) -> None:
    whole = client.responses.create(model="tiny", input="hi", **more)
    assert client.responses.retrieve(whole.id).id == whole.id
    assert list(client.responses.input_items.list(whole.id))
    with client.responses.stream(model="tiny", input="hi", **more) as stream:
        kinds = [event.type for event in stream]
    assert kinds[-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize(
    "more",
    [
        {}, {"tools": [{"name": "look", "input_schema": PARAMETERS}]},
        {"thinking": {"type": "disabled"}}, {"stop_sequences": ["wor"]},
    ],
    ids=str,
)  # fmt: skip
def test_messages(claude: anthropic.Anthropic, more: dict[str, Any]) -> None:
    whole = claude.messages.create(model="tiny", max_tokens=500, messages=HI, **more)
    assert whole.content
    with claude.messages.stream(model="tiny", max_tokens=500, messages=HI, **more) as stream:
        assert stream.get_final_message().stop_reason == whole.stop_reason
    counted = {k: v for k, v in more.items() if k == "tools"}
    assert claude.messages.count_tokens(model="tiny", messages=HI, **counted).input_tokens > 0
