"""The response object of /v1/responses.

It has all of OpenAI's fields with the values used, the status of each item for every way an
answer can end, and reasoning as a summary.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from localllm.engine.messages import Failure
from server.test_thinking_budget import OWN
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

RESPONSES = "/v1/responses"
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
HALF = CALL[: CALL.index('"x"')]
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", url + RESPONSES, json={**body, "stream": True}, trust_env=False) as r:
        return [json.loads(line[6:]) for line in r.iter_lines() if line.startswith("data: ")]


def test_a_response_has_all_of_openais_fields_with_the_values_used() -> None:
    with running_server({"tiny": ScriptedEngine()}) as running:
        sent = {
            "input": "hi", "temperature": 0.3, "user": "u", "metadata": {"a": "b"},
            "prompt_cache_key": "k", "max_tool_calls": 3, "top_logprobs": 2, "service_tier": "flex",
        }  # fmt: skip
        said = httpx.post(running.url + RESPONSES, json=sent, trust_env=False).json()
        assert set(Response.model_fields) <= set(said)
        assert {k: said[k] for k in sent if k != "input"} == {
            k: sent[k] for k in sent if k != "input"
        }
        assert (said["top_p"], said["background"]) == (0.95, False)
        assert said["completed_at"] >= said["created_at"]
        plain = httpx.post(running.url + RESPONSES, json={"input": "hi"}, trust_env=False).json()
        assert (plain["temperature"], plain["service_tier"], plain["metadata"]) == (
            0.8,
            "default",
            {},
        )
        assert Response.model_validate(plain, strict=False).status == "completed"


def test_a_response_without_input_is_refused() -> None:
    with running_server({"tiny": ScriptedEngine()}) as running:

        def status(**body: Any) -> int:
            return httpx.post(running.url + RESPONSES, json=body, trust_env=False).status_code

        assert (status(), status(input=None), status(instructions="be nice")) == (400, 400, 400)
        assert (status(input=[]), status(input="")) == (200, 200)
        first = httpx.post(running.url + RESPONSES, json={"input": "hi"}, trust_env=False).json()
        assert status(previous_response_id=first["id"]) == 200


@pytest.mark.parametrize(
    ("script", "sent", "items", "whole"),
    [
        (["Hello"], {}, ["completed"], "completed"),
        (["Hello"], {"max_output_tokens": 3}, ["incomplete"], "incomplete"),
        (["Hello"], {"stop": ["lo"]}, ["completed"], "completed"),
        (["<think>hm</think>", "Hello"], {"max_output_tokens": 19}, ["completed", "incomplete"], "incomplete"),
        (["<think>hm, well"], {"max_output_tokens": 9}, ["incomplete"], "incomplete"),
        (["Well.\n", CALL], {}, ["completed", "completed"], "completed"),
        (["Well.\n", CALL], {"max_output_tokens": 52}, ["completed", "incomplete"], "incomplete"),
        # Half a call, in an answer that the model itself ends.
        (["Well.\n", HALF], {}, ["completed", "incomplete"], "completed"),
    ],
)  # fmt: skip
def test_every_item_of_a_response_has_its_status(
    script: list[str], sent: dict[str, Any], items: list[str], whole: str
) -> None:
    engine = ScriptedEngine(script, chat_template=OWN)
    with running_server({"tiny": engine}) as running:
        body = {"input": "hi", "tools": [TOOL], **sent}
        got = events(running.url, body)
        said = httpx.post(running.url + RESPONSES, json=body, trust_env=False).json()
    ended = [e["item"]["status"] for e in got if e["type"] == "response.output_item.done"]
    last = got[-1]["response"]
    assert (ended, last["status"], got[-1]["type"]) == (items, whole, f"response.{whole}")
    assert [item["status"] for item in last["output"]] == items
    assert said["status"] == whole
    assert (said["completed_at"] is None) == (whole != "completed")
    if len(said["output"]) == len(items):  # a call that was cut is not part of a complete reply
        assert [item["status"] for item in said["output"]] == items


def test_an_item_cut_by_a_failure_is_incomplete() -> None:
    engine = ScriptedEngine(["Hel", Failure("", "worker_died", "gone")])
    with running_server({"tiny": engine}) as running:
        last = events(running.url, {"input": "hi"})[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]


def test_reasoning_is_returned_as_a_summary_on_request() -> None:
    engine = ScriptedEngine(["<think>first ", "then</think>", "Hello"], chat_template=OWN)
    with running_server({"tiny": engine}) as running:
        body = {"input": "hi", "reasoning": {"summary": "auto"}}
        got = events(running.url, body)
        said = httpx.post(running.url + RESPONSES, json=body, trust_env=False).json()
    part = {"type": "summary_text", "text": "first then"}
    assert said["reasoning"]["summary"] == "auto"
    assert (said["output"][0]["summary"], said["output"][0]["content"]) == ([part], [])
    of_summary = [e for e in got if "reasoning_summary" in e["type"]]
    kinds = [e["type"].removeprefix("response.reasoning_summary_") for e in of_summary]
    assert kinds == ["part.added", "text.delta", "text.delta", "text.done", "part.done"]
    assert {e["summary_index"] for e in of_summary} == {0}
    assert (of_summary[-1]["part"], of_summary[-2]["text"]) == (part, "first then")
