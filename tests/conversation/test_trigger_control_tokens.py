"""Calls whose inner markers are control tokens, from end to end.

A real model opens a call with its own token. A grammar that refers to the other tokens by name
holds the call to its tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from models import tiny_gguf
from support.http_server import running_server

# The opening comes first. Each marker replaces an unused word of the vocabulary.
MARKERS = {
    "kimi": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    "deepseek": (
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    "lfm": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
}  # fmt: skip
FIRST = 400
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "minimum": 1, "maximum": 3},
                    "unit": {"enum": ["C", "F"]},
                },
                "required": ["n", "unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("f", "g")
]


@pytest.fixture(scope="module", params=MARKERS)
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    path = tmp_path_factory.mktemp("control") / f"{request.param}.gguf"
    write_model(path, MARKERS[request.param])
    host = Supervisor(WorkerOptions(LoadSpec(path=str(path), n_ctx=2048, n_seq_max=2)))
    with (
        running_server({"m": host}) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def write_model(path: Path, markers: tuple[str, ...]) -> None:
    """Write a tiny model whose vocabulary and template have these markers."""
    add_tokens, add_types, common = (
        gguf.GGUFWriter.add_token_list,
        gguf.GGUFWriter.add_token_types,
        tiny_gguf.common,
    )
    there = range(FIRST, FIRST + len(markers))

    def tokens(self: Any, given: list[bytes]) -> None:
        add_tokens(
            self, [markers[i - FIRST].encode() if i in there else t for i, t in enumerate(given)]
        )

    def types(self: Any, given: list[gguf.TokenType]) -> None:
        add_types(self, [gguf.TokenType.CONTROL if i in there else t for i, t in enumerate(given)])

    def with_template(w: Any, **sizes: Any) -> None:
        common(w, **sizes)
        offer = "{% if tools %}{{ tools | tojson }}" + " ".join(markers) + "{% endif %}"
        w.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}" + offer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_list", tokens)
        patch.setattr(gguf.GGUFWriter, "add_token_types", types)
        patch.setattr(tiny_gguf, "common", with_template)
        tiny_gguf.write_llama(path)


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        # The opening, if no constraint forbids it.
        "logit_bias": {str(FIRST): 100},
        "max_tokens": 300,
        "tools": TOOLS,
        **fields,
    }
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def check(choice: dict[str, Any]) -> None:
    assert choice["finish_reason"] == "tool_calls", choice
    assert choice["message"]["tool_calls"]
    for call in choice["message"]["tool_calls"]:
        assert call["function"]["name"] in ("f", "g")
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments) == {"n", "unit"}
        assert arguments["n"] in (1, 2, 3)
        assert arguments["unit"] in ("C", "F")


def test_a_call_that_the_model_begins_is_constrained_to_its_schema(http: httpx.Client) -> None:
    choice = ask(http)
    check(choice)
    assert not choice["message"]["content"]


def test_a_schema_answer_or_a_call_fits_its_schema(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    check(ask(http, response_format=form))
    answer = ask(http, response_format=form, logit_bias={str(FIRST): -100})
    assert set(json.loads(answer["message"]["content"])) == {"ok"}
