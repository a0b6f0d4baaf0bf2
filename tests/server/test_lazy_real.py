"""`tool_choice: auto` on a real model.

A call that the model begins is constrained to its schema. An answer with a schema may be that
schema or a call. Reasoning tokens are counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server

TOOL = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "parameters": {
            "type": "object",
            "properties": {
                "room": {"enum": ["attic", "cellar"]},
                "percent": {"type": "integer", "maximum": 7},
            },
            "required": ["percent", "room"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def http(smollm2: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=2048, n_seq_max=2)))
    with (
        running_server({"smollm2": host}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def shots() -> list[dict[str, Any]]:
    """Return a conversation in which every request is answered by a call.

    The values of these calls violate the schema.
    """
    said: list[dict[str, Any]] = []
    for room, percent in (("kitchen", 90), ("bedroom", 50), ("garage", 70)):
        call = {"name": "set_lamp", "arguments": json.dumps({"room": room, "percent": percent})}
        said += [
            {"role": "user", "content": f"Set the lamp in the {room} to {percent} percent."},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            },
        ]
    return [*said, {"role": "user", "content": "Set the lamp in the hall to 60 percent."}]


def ask(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"messages": shots(), "tools": [TOOL], "temperature": 0, "max_tokens": 80, **fields}
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_a_call_that_the_model_begins_is_constrained_to_its_schema(http: httpx.Client) -> None:
    choice = ask(http)
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        assert arguments["room"] in ("attic", "cellar")
        assert arguments["percent"] <= 7
        assert set(arguments) == {"room", "percent"}


def test_a_schema_answer_or_a_call_fits_its_schema(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["good", "bad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    choice = ask(http, response_format=form)
    assert choice["finish_reason"] == "tool_calls"
    hello = ask(
        http, response_format=form, messages=[{"role": "user", "content": "How are you today?"}]
    )
    if hello["finish_reason"] == "stop":
        assert json.loads(hello["message"]["content"])["mood"] in ("good", "bad")
    else:
        assert json.loads(hello["message"]["tool_calls"][0]["function"]["arguments"])["room"] in (
            "attic",
            "cellar",
        )
