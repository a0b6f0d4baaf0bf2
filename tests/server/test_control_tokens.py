"""Formats whose markers are control tokens.

If a real model writes Mistral's [TOOL_CALLS] as its one control token, the call is read. No
control token appears in a plain answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gguf
import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from models import tiny_gguf
from support.http_server import running_server

MARKER = tiny_gguf.VOCAB - 2
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson "
    "}}[TOOL_CALLS]{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 3}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("control") / "control.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_list", _renamed(gguf.GGUFWriter.add_token_list))
        patch.setattr(tiny_gguf, "common", _with_template(tiny_gguf.common))
        tiny_gguf.write_llama(path)
    host = Supervisor(WorkerOptions(LoadSpec(path=str(path), n_ctx=2048, n_seq_max=2)))
    with (
        running_server({"m": host}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def _renamed(real: Any) -> Any:
    def add(self: Any, tokens: list[bytes]) -> None:
        real(self, [b"[TOOL_CALLS]" if t == b"<|turn|>" else t for t in tokens])

    return add


def _with_template(real: Any) -> Any:
    def common(w: Any, **sizes: Any) -> None:
        real(w, **sizes)
        w.add_chat_template(TEMPLATE)

    return common


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        # The marker, if no constraint forbids it.
        "logit_bias": {str(MARKER): 100},
        "max_tokens": 200,
        **fields,
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def calls_as_declared(choice: dict[str, Any]) -> bool:
    """Return whether the choice ends in calls of TOOL with arguments that its schema allows."""
    calls = [c["function"] for c in choice["message"].get("tool_calls") or ()]
    kept = all(c["name"] == "f" and json.loads(c["arguments"])["n"] in (1, 2, 3) for c in calls)
    return choice["finish_reason"] == "tool_calls" and bool(calls) and kept


def test_the_marker_as_one_control_token_opens_a_call_held_to_its_schema(
    http: httpx.Client,
) -> None:
    assert calls_as_declared(ask(http, tools=[TOOL], seed=1))


def test_a_required_call_has_the_same_format(http: httpx.Client) -> None:
    assert calls_as_declared(ask(http, tools=[TOOL], tool_choice="required"))


def test_a_schema_answer_or_a_call_after_the_control_token_fits_its_schema(
    http: httpx.Client,
) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}},
    }
    assert calls_as_declared(ask(http, tools=[TOOL], response_format=form))
    against = {"logit_bias": {str(MARKER): -100}}
    answer = ask(http, tools=[TOOL], response_format=form, **against)
    assert set(json.loads(answer["message"]["content"])) == {"ok"}


def test_a_plain_answer_shows_no_control_token(http: httpx.Client) -> None:
    choice = ask(http, max_tokens=5)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
