"""Parts of a message that cannot be read here.

They are refused if the question is about them. In earlier turns a note to the model replaces
them.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
INPUT_PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
NOTE = "[image omitted: this model does not support images]"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content "
    "}}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}{% endfor "
    "%}<assistant>"
)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(["yes"], chat_template=TEMPLATE + "{{ tools }}")


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def user_text(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
HISTORIES: dict[str, tuple[str, dict[str, Any]]] = {
    "an earlier turn": (
        "/v1/chat/completions",
        {
            "messages": [
                user("what?", PICTURE),
                {"role": "assistant", "content": "no"},
                user("go on"),
            ]
        },
    ),
    "a turn that was refused": (
        "/v1/chat/completions",
        {"messages": [user(PICTURE), user("never mind")]},
    ),
    "a tool's result": (
        "/v1/chat/completions",
        {
            "messages": [
                user("look"),
                {"role": "assistant", "tool_calls": [CALL]},
                {
                    "role": "tool",
                    "tool_call_id": "c",
                    "content": [{"type": "text", "text": "here"}, PICTURE],
                },
            ]
        },
    ),
    "a tool's image in a message of the user's": (
        "/v1/chat/completions",
        {
            "messages": [
                user("look"),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "see below"},
                user(PICTURE),
            ]
        },
    ),
    "an output of a function": (
        "/v1/responses",
        {
            "input": [
                user("look"),
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [INPUT_PICTURE]},
            ]
        },
    ),
    "an earlier item": (
        "/v1/responses",
        {"input": [user(INPUT_PICTURE), {"role": "assistant", "content": "no"}, user("go on")]},
    ),
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_in_the_history_is_a_note(
    http: httpx.Client, engine: ScriptedEngine, name: str, stream: bool
) -> None:
    path, body = HISTORIES[name]
    reply = http.post(path, json={**body, "stream": stream})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-localllm-ignored"] == "messages.images"
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, str)
    assert prompt.count(NOTE) == 1


def test_an_image_that_is_asked_about_is_refused(http: httpx.Client) -> None:
    for path, body in (
        (
            "/v1/chat/completions",
            {"messages": [user("hi"), {"role": "assistant", "content": "no"}, user(PICTURE)]},
        ),
        ("/v1/responses", {"input": [user("what is it?", INPUT_PICTURE)]}),
        # A system text after the question makes no difference.
        ("/v1/chat/completions", {"messages": [user(PICTURE), {"role": "system", "content": "x"}]}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400
        assert "images" in reply.json()["error"]["message"]


def test_the_next_question_is_answered_without_the_refused_image(http: httpx.Client) -> None:
    messages = [user("what is it?", PICTURE), user_text("never mind")]
    reply = http.post("/v1/chat/completions", json={"messages": messages})
    assert reply.status_code == 200
    assert reply.headers["x-localllm-ignored"] == "messages.images"


@pytest.mark.parametrize(
    "part", [{"type": "thinking", "thinking": "so so"}, {"type": "thinking", "thinking": [{"type": "text", "text": "so "
                                                                                                                   "so"}]}]
)  # fmt: skip
def test_reasoning_in_parts_is_reasoning(
    http: httpx.Client, engine: ScriptedEngine, part: dict[str, Any]
) -> None:
    said = {"role": "assistant", "content": [part, {"type": "text", "text": "no"}]}
    reply = http.post("/v1/chat/completions", json={"messages": [user("a"), said, user("b")]})
    assert reply.status_code == 200, reply.text
    assert "<assistant>(so so)no<user>b" in str(engine.requests[-1].prompt)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_thinking_in_a_users_turn_is_named_if_old_and_refused_in_the_question(
    http: httpx.Client, path: str
) -> None:
    """A thinking block in a user's turn is named if it is old, and refused if it is in the
    question."""
    sent = user({"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Why?"})
    more = {"max_tokens": 9, "stream": False}
    earlier = http.post(path, json={"messages": [sent, user_text("go on")], **more})
    assert earlier.status_code == 200, earlier.text
    assert "messages.thinking" in earlier.headers["x-localllm-ignored"]
    asked = http.post(path, json={"messages": [sent], **more})
    assert asked.status_code == 400
    assert "thinking" in asked.text
