"""Every common way to switch reasoning off works in every dialect, with any template.

Reasoning may also be left out of the answer, or be returned as a summary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.messages import ThinkingLimit
from localllm.server.models.router import ServedModel
from server.test_thinking_budget import HI, OPENED, OWN, Thinker, ask
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

SWITCH = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{{ '' if enable_thinking is false else "
    "'<think>' }}{# </think> #}"
)
PATHS = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 500},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "hi", "stream": False},
}
SPELLINGS: list[dict[str, Any]] = [
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"think": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False}},
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
]
AT_ONCE = ThinkingLimit(0, "<think>", "</think>", "\n\n", opened=True)


@pytest.mark.parametrize("path", PATHS)
def test_reasoning_is_off_with_every_common_setting(path: str) -> None:
    switched, opened, own = (ScriptedEngine(chat_template=t) for t in (SWITCH, OPENED, OWN))
    with running_server({"switched": switched, "opened": opened, "own": own}) as running:
        for spelled in SPELLINGS:
            for name in ("switched", "opened", "own"):
                body = {**PATHS[path], **spelled, "model": name}
                reply = httpx.post(running.url + path, json=body, trust_env=False)
                assert reply.status_code == 200, reply.text
                told = reply.headers.get("x-localllm-ignored", "")
                assert not told.replace("chat_template_kwargs", "").strip(",").startswith("r"), told
            assert "<think>" not in str(switched.requests[-1].prompt)
            assert opened.requests[-1].thinking == AT_ONCE
            assert own.requests[-1].thinking is not None
            assert own.requests[-1].thinking.tokens == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_real_model_whose_template_opens_reasoning_answers_at_once(
    few_layers: Path, path: str
) -> None:
    with running_server([ServedModel("toy", Thinker(few_layers, OPENED))]) as running:
        body = {**PATHS[path], "think": False, "seed": 1}
        if path.startswith("/api"):
            body["options"] = {"num_predict": 12}
        else:
            body["max_output_tokens" if "responses" in path else "max_tokens"] = 12
        said = httpx.post(running.url + path, json=body, trust_env=False, timeout=60).json()
    text = json.dumps(said)
    assert "reasoning_text" not in text
    assert "reasoning_content" not in text
    assert '"thinking"' not in text
    answer = said.get("response") or said.get("message") or said.get("content") or said
    assert json.dumps(answer).count("think>") == 0


HIDING = [
    ("/v1/chat/completions", {"reasoning": {"exclude": True}}),
    ("/v1/chat/completions", {"include_reasoning": False}),
    ("/v1/messages", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    ("/v1/responses", {"reasoning": {"exclude": True}}),
]


@pytest.mark.parametrize(("path", "field"), HIDING, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_may_be_left_out(path: str, field: dict[str, Any], stream: bool) -> None:
    engine = ScriptedEngine(["<think>secret</think>", "\n\nshown"], chat_template=OWN)
    with running_server({"tiny": engine}) as running:
        body = {**PATHS[path], **field, "stream": stream}
        reply = httpx.post(running.url + path, json=body, trust_env=False)
        assert reply.status_code == 200, reply.text
        assert "secret" not in reply.text
        assert "shown" in reply.text
        # This model has no adaptive effort.
        assert reply.headers.get("x-localllm-ignored", "") in ("", "thinking.type")
        shown = httpx.post(
            running.url + path, json=PATHS[path] | {"stream": stream}, trust_env=False
        )
        assert "secret" in shown.text


@pytest.mark.parametrize(("path", "field"), HIDING, ids=str)
def test_a_field_that_hides_reasoning_is_named_as_ignored_without_reasoning(
    path: str, field: dict[str, Any]
) -> None:
    with running_server({"tiny": ScriptedEngine()}) as running:
        reply = ask(running.url, path, {**PATHS[path], **field})
        ((outer, inner),) = field.items()
        name = f"{outer}.{[*inner][-1]}" if isinstance(inner, dict) else outer
        assert name in reply.headers["x-localllm-ignored"].split(",")
