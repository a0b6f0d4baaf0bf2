"""A reasoning budget reaches the engine from every dialect.

It uses the words of the model's own template, and a real model's reasoning ends there.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.messages import ThinkingLimit
from localllm.engine.worker.client import WorkerClient, WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ServedModel
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor "
    "%}<|im_start|>assistant\n"
)
OPENED = TURNS + "<think>\n{# ends with </think> #}"
OWN = TURNS + "{# <think> and </think> are the model's own words #}"
FIELDS = [
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 30}}),
    ("/v1/chat/completions", {"thinking_budget": 30}),
    ("/v1/chat/completions", {"thinking_token_budget": 30}),
    ("/v1/chat/completions", {"thinking_budget_tokens": 30}),
    ("/v1/chat/completions", {"reasoning_budget_tokens": 30}),
    ("/v1/responses", {"input": "hi", "reasoning": {"max_tokens": 30}}),
    ("/v1/responses", {"input": "hi", "thinking_budget": 30}),
    ("/v1/responses", {"input": "hi", "reasoning_budget_tokens": 30}),
    ("/v1/messages", {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 30}}),
    ("/api/chat", {"stream": False, "options": {"thinking_budget": 30}}),
]


BUDGETS = ("thinking_budget", "max_tokens", "token_budget", "budget_tokens")


def ask(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    sent = body if "input" in body else {"messages": HI, **body}
    return httpx.post(url + path, json=sent, trust_env=False, timeout=120)


@pytest.mark.parametrize(("path", "body"), FIELDS, ids=str)
@pytest.mark.parametrize(
    ("template", "opened"), [(OPENED, True), (OWN, False)], ids=["opened", "own"]
)
def test_every_dialects_budget_reaches_the_engine(
    path: str, body: dict[str, Any], template: str, opened: bool
) -> None:
    engine = ScriptedEngine(chat_template=template)
    with running_server({"tiny": engine}) as running:
        reply = ask(running.url, path, body)
        assert reply.status_code == 200, reply.text
        assert "budget" not in reply.headers.get("x-localllm-ignored", "")
        assert engine.requests[-1].thinking == ThinkingLimit(
            30, "<think>", "</think>", "\n\n", opened
        )


@pytest.mark.parametrize(("path", "body"), FIELDS, ids=str)
def test_a_budget_for_a_model_without_reasoning_is_named_as_ignored(
    path: str, body: dict[str, Any]
) -> None:
    engine = ScriptedEngine(chat_template=TURNS)
    with running_server({"tiny": engine}) as running:
        reply = ask(running.url, path, body)
        named = reply.headers["x-localllm-ignored"].split(",")
        assert any(name.rpartition(".")[2].endswith(BUDGETS) for name in named), named
        assert engine.requests[-1].thinking is None


def test_minus_one_is_no_limit_and_nonsense_is_refused() -> None:
    engine = ScriptedEngine(chat_template=OPENED)
    with running_server({"tiny": engine}) as running:
        for body in ({"thinking_budget": -1}, {"reasoning": {"max_tokens": -1}}, {"reasoning": {}}):
            assert ask(running.url, "/v1/chat/completions", body).status_code == 200
            assert engine.requests[-1].thinking is None
        for path, bad in (
            ("/v1/chat/completions", {"thinking_budget": -2}),
            ("/v1/chat/completions", {"reasoning": {"max_tokens": "much"}}),
            (
                "/v1/messages",
                {"max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": "much"}},
            ),
        ):
            assert ask(running.url, path, bad).status_code == 400


class Thinker:
    """An engine with a template that reasons."""

    def __init__(self, path: Path, template: str) -> None:
        self._inner = Supervisor(WorkerOptions(LoadSpec(path=str(path), n_ctx=1024, n_seq_max=2)))
        self._template = template

    async def engine(self) -> WorkerClient:
        client = await self._inner.engine()
        client.info = replace(client.info, chat_template=self._template)
        return client

    async def close(self) -> None:
        await self._inner.close()


@pytest.fixture(scope="module")
def thinker(few_layers: Path):
    with running_server([ServedModel("toy", Thinker(few_layers, OPENED))]) as running:
        yield running.url


QUESTION = {
    "messages": [{"role": "user", "content": "Write a long story about a lighthouse."}],
    "temperature": 0,
}


def test_a_models_reasoning_ends_at_the_budget_and_its_answer_follows(thinker: str) -> None:
    free = ask(thinker, "/v1/chat/completions", {**QUESTION, "max_tokens": 90}).json()["choices"][0]
    assert free["message"]["content"] == ""
    held = ask(
        thinker, "/v1/chat/completions", {**QUESTION, "max_tokens": 90, "thinking_budget": 20}
    ).json()
    message = held["choices"][0]["message"]
    thought = message["reasoning_content"]
    assert thought
    assert free["message"]["reasoning_content"].startswith(thought)
    assert message["content"]
    assert "think>" not in message["content"]
    # The tokens of the budget, and those of the marker, which this vocabulary splits into several.
    assert 20 <= held["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 28


def test_an_answer_to_a_schema_follows_after_the_reasoning_budget(thinker: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    body = {**QUESTION, "max_tokens": 120, "thinking_budget": 15, "json_schema": schema}
    message = ask(thinker, "/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning_content"]
    assert json.loads(message["content"])["a"] in (1, 2)


def test_a_budget_of_zero_gives_an_answer_without_reasoning(thinker: str) -> None:
    message = ask(
        thinker, "/v1/chat/completions", {**QUESTION, "max_tokens": 30, "thinking_budget": 0}
    ).json()["choices"][0]["message"]
    assert not message.get("reasoning_content")
    assert message["content"]
