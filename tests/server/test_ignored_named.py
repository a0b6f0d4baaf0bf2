"""Every route that reads a body names its fields without effect in x-localllm-ignored.

This includes routes that generate no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with (
        running_server({"tiny": ScriptedEngine()}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/apply-template", {"messages": HI}),
        ("/tokenize", {"content": "a"}),
        ("/tokenize", {"content": "a", "with_pieces": True}),
        ("/detokenize", {"tokens": [97]}),
        ("/models/load", {"model": "tiny"}),
        ("/models/unload", {"model": "tiny"}),
        ("/api/show", {"model": "tiny"}),
    ],
)
def test_an_unknown_field_is_named(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    named = http.post(path, json={**body, "an_editors_own": 1})
    assert (named.status_code, named.headers.get("x-localllm-ignored")) == (
        200,
        "an_editors_own",
    ), named.text
    assert "x-localllm-ignored" not in http.post(path, json=body).headers


def test_the_tokens_of_a_response_name_the_tools_that_are_left_out(http: httpx.Client) -> None:
    reply = http.post(
        "/v1/responses/input_tokens", json={"input": "hi", "tools": [{"type": "web_search"}]}
    )
    assert (reply.status_code, reply.headers["x-localllm-ignored"]) == (200, "tools.web_search")


def test_apply_template_renders_the_same_prompt_as_a_chat(http: httpx.Client) -> None:
    """/apply-template renders the same prompt as /v1/chat/completions, including tools.

    Earlier it dropped the tools without a note.
    """

    def prompt(**more: Any) -> str:
        reply = http.post("/apply-template", json={"messages": HI, **more})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["prompt"])

    assert '"look"' in prompt(tools=[LOOK])
    assert '"look"' not in prompt(tools=[LOOK], tool_choice="none")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    history = [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "a"}, *HI]
    reply = http.post("/apply-template", json={"messages": history, "reasoning_effort": "low"})
    assert set(reply.headers["x-localllm-ignored"].split(",")) == {
        "messages.images",
        "reasoning_effort",
    }
