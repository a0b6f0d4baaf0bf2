"""Stored responses and their items: references to them, what they answered, and what can't be done with them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from localllm.server.dialects.responses.store import ConversationFields, Conversations
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'


def _part(text: str) -> list[dict[str, str]]:
    """A sent text as it is stored: the SDK's types have parts."""
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
    """As the AI SDK's OpenAI provider sends a tool loop: everything it got comes back as references."""
    first = create(http, "Look x up.")
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    asked = {"role": "user", "content": "Look x up."}
    done = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "42"}
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    create(http, [asked, *references, done])
    by_reference = engine.requests[-1].prompt
    create(http, [asked, {"id": references[0]["id"]}, references[1], done])
    without_type = engine.requests[-1].prompt
    create(http, [asked, *first["output"], done])
    assert by_reference == without_type == engine.requests[-1].prompt
    assert "Well," in str(by_reference)
    assert '"q": "x"' in str(by_reference)


def test_a_reference_to_nothing_says_what_to_send(http: httpx.Client) -> None:
    kept = create(http, "Hi.")["output"][0]["id"]
    lost = create(http, "Hi.", store=False)["output"][0]["id"]
    for item_id, status in ((kept, 200), (lost, 400), ("msg_nobody", 400)):
        reply = http.post(RESPONSES, json={"input": [{"type": "item_reference", "id": item_id}]})
        assert reply.status_code == status
        if status == 400:
            assert reply.json()["error"]["param"] == "input[0]"
            assert "not stored here" in reply.text


def test_a_deleted_response_takes_its_items_along(http: httpx.Client) -> None:
    body = create(http, "Hi.")
    assert http.delete(f"{RESPONSES}/{body['id']}").json()["deleted"] is True
    reference = {"type": "item_reference", "id": body["output"][0]["id"]}
    assert http.post(RESPONSES, json={"input": [reference]}).status_code == 400
    assert http.get(f"{RESPONSES}/{body['id']}").status_code == 404
    assert http.delete(f"{RESPONSES}/{body['id']}").status_code == 404


def test_a_response_says_what_it_answered(http: httpx.Client) -> None:
    first = create(http, "One.")
    second = create(http, [{"role": "user", "content": "Two."}, {"role": "user", "content": "Three."}],
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


def test_a_response_that_ended_is_not_cancelled(http: httpx.Client) -> None:
    body = create(http, "Hi.")
    reply = http.post(f"{RESPONSES}/{body['id']}/cancel")
    assert (reply.status_code, "background" in reply.json()["error"]["message"]) == (400, True)
    assert http.post(f"{RESPONSES}/resp_nobody/cancel").status_code == 404


def test_a_conversation_grows_with_every_answer(http: httpx.Client, engine: ScriptedEngine) -> None:
    begun = {"items": [{"type": "message", "role": "user", "content": "One."}], "metadata": {"a": "b"}}
    made = http.post(CONVERSATIONS, json=begun).json()
    assert (made["object"], made["metadata"]) == ("conversation", {"a": "b"})
    first = create(http, "Two.", conversation=made["id"])
    assert first["conversation"] == {"id": made["id"]}
    assert "One." in str(engine.requests[-1].prompt)
    create(http, "Three.", conversation={"id": made["id"]}, store=False, stream=False)
    prompt = str(engine.requests[-1].prompt)
    assert [prompt.index(said) for said in ("One.", "Two.", "Well,", "Three.")] == sorted(
        prompt.index(said) for said in ("One.", "Two.", "Well,", "Three.")
    )
    path = f"{CONVERSATIONS}/{made['id']}"
    items = http.get(path + "/items", params={"order": "asc"}).json()["data"]
    kinds = [item.get("type", "message") for item in items]
    assert kinds == ["message", "message", "message", "function_call", "message", "message", "function_call"]
    assert [i["id"] for i in items[2:4]] == [i["id"] for i in first["output"]]
    assert http.get(f"{path}/items/{items[0]['id']}").json() == items[0]
    assert http.delete(f"{path}/items/{items[0]['id']}").json()["id"] == made["id"]
    assert http.get(f"{path}/items/{items[0]['id']}").status_code == 404
    added = http.post(path + "/items", json={"items": [{"role": "user", "content": "Four."}]}).json()
    assert added["data"][0]["content"] == _part("Four.")
    assert http.post(path, json={"metadata": {"c": "d"}}).json()["metadata"] == {"c": "d"}
    assert http.get(path).json()["metadata"] == {"c": "d"}


def test_a_conversation_that_is_none_is_a_404(http: httpx.Client) -> None:
    made = http.post(CONVERSATIONS, json={}).json()
    assert http.delete(f"{CONVERSATIONS}/{made['id']}").json()["deleted"] is True
    for reply in (
        http.post(RESPONSES, json={"input": "Hi.", "conversation": made["id"]}),
        http.get(f"{CONVERSATIONS}/{made['id']}"),
        http.get(f"{CONVERSATIONS}/{made['id']}/items"),
    ):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "conversation_not_found")


def test_one_conversation_at_a_time(http: httpx.Client) -> None:
    made, first = http.post(CONVERSATIONS, json={}).json(), create(http, "Hi.")
    both = {"input": "Hi.", "conversation": made["id"], "previous_response_id": first["id"]}
    reply = http.post(RESPONSES, json=both)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "conversation")


def test_a_conversation_deleted_while_it_is_answered_ends_well(http: httpx.Client, engine: ScriptedEngine) -> None:
    made = http.post(CONVERSATIONS, json={}).json()
    gate = Gate()
    asked = {"input": "Hi.", "conversation": made["id"], "stream": True}
    engine.script = ["a", gate, "b"]
    kinds: list[str] = []
    try:
        with (
            httpx.Client(base_url=http.base_url, trust_env=False) as other,
            http.stream("POST", RESPONSES, json=asked) as reply,
        ):
            for line in reply.iter_lines():
                kinds += [line[7:]] if line.startswith("event: ") else []
                if kinds[-1:] == ["response.output_text.delta"] and kinds.count(kinds[-1]) == 1 and not line:
                    assert other.delete(f"{CONVERSATIONS}/{made['id']}").status_code == 200
                    gate.open()
    finally:
        engine.script = ["Well, ", CALL]
    assert kinds[-1] == "response.completed"


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
    conversation = http.post(CONVERSATIONS, json={"items": _SENT}).json()["id"]
    for path in (f"{RESPONSES}/{response['id']}/input_items", f"{CONVERSATIONS}/{conversation}/items"):
        items = http.get(path, params={"limit": 100, "order": "asc"}).json()["data"][: len(_SENT)]
        heads = [(item["type"], item["id"].partition("_")[0]) for item in items]
        message, call = ("message", "msg"), ("function_call", "fc")
        assert heads == [*[message] * 4, ("reasoning", "rs"), call, ("function_call_output", "fco")]
        assert items[0]["content"] == [{"type": "input_text", "text": "Hi."}]
        assert items[1]["content"] == [{"type": "output_text", "text": "Hello.", "annotations": [], "logprobs": []}]
        assert items[2]["content"] == items[1]["content"]
        assert items[4]["summary"] == []
        assert all(item["status"] == "completed" for item in items if item["type"] != "reasoning")


def test_a_response_says_what_it_wrote_to_the_cache(http: httpx.Client) -> None:
    usage = create(http, "Hi.")["usage"]
    details = usage["input_tokens_details"]
    assert details["cache_write_tokens"] == usage["input_tokens"] - details["cached_tokens"]


def test_room_that_a_dropped_item_took_is_free_again() -> None:
    kept = Conversations()
    first, second = (kept.create(ConversationFields(items=[]))["id"] for _ in range(2))
    large = {"role": "user", "content": "x" * (40 * 2**20)}
    for _ in range(3):  # two of them at once would push a conversation out
        item = kept.add(first, [large])[0]
        kept.drop_item(first, item["id"])
    assert kept.items(first) == kept.items(second) == []


def test_compacting_is_refused_by_name(http: httpx.Client) -> None:
    answer = http.post(RESPONSES + "/compact", json={"input": "Hi."})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert "responses.compact" in answer.json()["error"]["message"]
