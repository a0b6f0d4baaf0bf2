"""Stored responses and their items: references to them, their input items, and invalid uses."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import httpx
import pytest

from localllm.server.dialects.responses.items import ResponseStore
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'


def _part(text: str) -> list[dict[str, str]]:
    """Return a sent text in its stored form, with the parts that the SDK's types require."""
    return [{"type": "input_text", "text": text}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(["Well, ", CALL])


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def create(http: httpx.Client, given: Any, **more: Any) -> dict[str, Any]:
    reply = http.post(RESPONSES, json={"input": given, "tools": [TOOL], **more})
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_a_reference_stands_for_its_item(http: httpx.Client, engine: ScriptedEngine) -> None:
    """A reference is replaced by its item.

    The AI SDK's OpenAI provider sends a tool loop this way: all items that it received are
    references.
    """
    first = create(http, "Look x up.")
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    asked = {"role": "user", "content": "Look x up."}
    done = {
        "type": "function_call_output",
        "call_id": first["output"][1]["call_id"],
        "output": "42",
    }
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    create(http, [asked, *references, done])
    by_reference = engine.requests[-1].prompt
    create(http, [asked, {"id": references[0]["id"]}, references[1], done])
    without_type = engine.requests[-1].prompt
    create(http, [asked, *first["output"], done])
    assert by_reference == without_type == engine.requests[-1].prompt
    assert "Well," in str(by_reference)
    assert '"q": "x"' in str(by_reference)


def test_a_reference_to_an_unknown_item_is_refused_with_a_solution(http: httpx.Client) -> None:
    kept = create(http, "Hi.")["output"][0]["id"]
    lost = create(http, "Hi.", store=False)["output"][0]["id"]
    for item_id, status in ((kept, 200), (lost, 400), ("msg_nobody", 400)):
        reply = http.post(RESPONSES, json={"input": [{"type": "item_reference", "id": item_id}]})
        assert reply.status_code == status
        if status == 400:
            assert reply.json()["error"]["param"] == "input[0]"
            assert "does not store" in reply.text


def test_several_references_to_one_item_are_refused(http: httpx.Client) -> None:
    """A long item that is referred to many times would take any amount of memory."""
    item_id = create(http, "Hi.")["output"][0]["id"]
    reference = {"type": "item_reference", "id": item_id}
    reply = http.post(RESPONSES, json={"input": [reference, reference]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "input[1]"
    assert "another reference" in reply.text


def test_the_time_to_resolve_references_grows_linearly(http: httpx.Client) -> None:
    """Items of a type that the model does not see make long requests possible."""
    skipped = [{"type": "x", "id": f"item {i}"} for i in range(16_000)]
    create(http, [{"role": "user", "content": "Hi."}, *skipped])
    references = [{"id": item["id"]} for item in skipped]
    began_s = time.process_time()
    create(http, [{"role": "user", "content": "Hi."}, *references])
    assert time.process_time() - began_s < 3


def test_the_store_counts_the_memory_of_its_values() -> None:
    """Short lists take many times as much memory as their JSON text."""
    store = ResponseStore()
    tracemalloc.start()
    try:
        for i in range(60):
            lists = json.loads("[" + "[]," * 49_000 + "1]")
            store.put({"id": f"resp_{i}", "output": []}, [{"type": "x", "values": lists}])
        assert tracemalloc.get_traced_memory()[0] < 80 * 2**20
    finally:
        tracemalloc.stop()
    assert store.get("resp_59").input_items


def test_deleting_a_response_deletes_its_items(http: httpx.Client) -> None:
    body = create(http, "Hi.")
    assert http.delete(f"{RESPONSES}/{body['id']}").json()["deleted"] is True
    reference = {"type": "item_reference", "id": body["output"][0]["id"]}
    assert http.post(RESPONSES, json={"input": [reference]}).status_code == 400
    assert http.get(f"{RESPONSES}/{body['id']}").status_code == 404
    assert http.delete(f"{RESPONSES}/{body['id']}").status_code == 404


def test_the_input_items_of_a_response_can_be_listed(http: httpx.Client) -> None:
    first = create(http, "One.")
    second = create(http, [{"role": "user", "content": "Two."}, {"role": "user",
        "content": "Three."}],
                    previous_response_id=first["id"])  # fmt: skip
    path = f"{RESPONSES}/{second['id']}/input_items"
    listed = http.get(path, params={"order": "asc"}).json()
    said = [item.get("content") for item in listed["data"]]
    assert (said[0], said[-2:]) == (_part("One."), [_part("Two."), _part("Three.")])
    assert [i["id"] for i in listed["data"]][1:3] == [i["id"] for i in first["output"]]
    assert all(item["id"] for item in listed["data"])
    assert (listed["object"], listed["has_more"]) == ("list", False)
    newest = http.get(path, params={"limit": 1}).json()
    assert (newest["data"][0]["content"], newest["has_more"]) == (_part("Three."), True)
    after = http.get(path, params={"limit": 1, "after": newest["last_id"]}).json()
    assert after["data"][0]["content"] == _part("Two.")
    assert http.get(f"{RESPONSES}/resp_nobody/input_items").status_code == 404


def test_cancelling_a_completed_response_is_refused(http: httpx.Client) -> None:
    body = create(http, "Hi.")
    reply = http.post(f"{RESPONSES}/{body['id']}/cancel")
    assert (reply.status_code, "background" in reply.json()["error"]["message"]) == (400, True)
    assert http.post(f"{RESPONSES}/resp_nobody/cancel").status_code == 404


_SENT: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "Hello."},
    {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "42"},
]


def test_stored_items_have_all_that_their_types_have(http: httpx.Client) -> None:
    response = create(http, [*_SENT, {"role": "user", "content": "Go."}])
    path = f"{RESPONSES}/{response['id']}/input_items"
    items = http.get(path, params={"limit": 100, "order": "asc"}).json()["data"][: len(_SENT)]
    heads = [(item["type"], item["id"].partition("_")[0]) for item in items]
    message, call = ("message", "msg"), ("function_call", "fc")
    assert heads == [*[message] * 4, ("reasoning", "rs"), call, ("function_call_output", "fco")]
    assert items[0]["content"] == [{"type": "input_text", "text": "Hi."}]
    assert items[1]["content"] == [
        {"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}
    ]
    assert items[2]["content"] == items[1]["content"]
    assert items[4]["summary"] == []
    assert all(item["status"] == "completed" for item in items if item["type"] != "reasoning")


def test_the_usage_of_a_response_has_the_tokens_written_to_the_cache(http: httpx.Client) -> None:
    usage = create(http, "Hi.")["usage"]
    details = usage["input_tokens_details"]
    assert details["cache_write_tokens"] == usage["input_tokens"] - details["cached_tokens"]
