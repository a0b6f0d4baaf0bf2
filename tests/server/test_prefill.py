"""Prefilled answers in every dialect.

If the conversation ends with an assistant's text, the answer continues that text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

BEGUN = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Sure, "}]
OPEN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure, "
CLOSED = OPEN + "<|im_end|>\n<|im_start|>assistant\n"
CHAT = "/v1/chat/completions"
# These templates add reasoning before every answer, reject an answer at the end, or trim its text.
STRICT = """{% for m in messages %}{% if loop.last and m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}
{{- '<' + m.role + '>' + m.content | trim }}{% endfor %}{% if add_generation_prompt %}<assistant><think>
{% endif %}{# </think> #}"""
TRIMMING = """{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '</>' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"tiny": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": BEGUN}),
        (CHAT, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}),
        (CHAT, {"messages": BEGUN, "add_generation_prompt": False}),
        ("/v1/messages", {"messages": BEGUN, "max_tokens": 20}),
        (
            "/v1/messages",
            {
                "messages": [
                    BEGUN[0],
                    {"role": "assistant", "content": [{"type": "text", "text": "Sure, "}]},
                ],
                "max_tokens": 20,
            },
        ),
        ("/api/chat", {"messages": BEGUN, "stream": False}),
        ("/v1/responses", {"input": BEGUN}),
    ],
)
def test_a_prefilled_answer_is_continued(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert engine.requests[0].prompt == OPEN
    assert "Hello world!" in answer.text
    assert "Sure, Hello" not in answer.text  # the reply contains only the text that the model added


@pytest.mark.parametrize(
    "field", [{"continue_final_message": False}, {"add_generation_prompt": True}]
)
def test_a_client_may_request_a_new_answer_instead(
    http: httpx.Client, engine: ScriptedEngine, field: dict[str, Any]
) -> None:
    assert http.post(CHAT, json={"messages": BEGUN, **field}).status_code == 200
    assert engine.requests[0].prompt == CLOSED


@pytest.mark.parametrize(
    "body",
    [
        {"messages": BEGUN[:1], "continue_final_message": True},
        {"messages": BEGUN[:1], "add_generation_prompt": False},
        {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_invalid_continuation_settings_are_refused_by_name(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("continue_final_message", "add_generation_prompt")


@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt"])
def test_template_variables_that_are_the_conversation_are_refused(
    http: httpx.Client, name: str
) -> None:
    answer = http.post(CHAT, json={"messages": BEGUN, "chat_template_kwargs": {name: 1}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"chat_template_kwargs.{name}"


def test_a_last_message_with_tool_calls_is_not_continued(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [BEGUN[0], {"role": "assistant", "content": "I look", "tool_calls": [call]}]
    assert http.post(CHAT, json={"messages": messages}).status_code == 200
    assert engine.requests[0].prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (TRIMMING, "<user>hi</><assistant>Sure, "),
        (STRICT, "<user>hi<assistant><think>\n\n</think>\n\nSure, "),
    ],
)
def test_the_text_stays_as_sent_whatever_the_template_does(template: str, prompt: str) -> None:
    engine = ScriptedEngine(chat_template=template)
    with (
        running_server({"tiny": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        answer = client.post(CHAT, json={"messages": BEGUN})
        assert answer.status_code == 200, answer.text
        assert engine.requests[0].prompt == prompt
        assert answer.json()["choices"][0]["message"]["content"] == "Hello world!"
