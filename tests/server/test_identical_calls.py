"""A model that repeats the same call.

The repetition is named in a header and a comment. The answer ends if the client asks for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.conversation.messages import normalise
from localllm.conversation.repeated_calls import repeated_call
from localllm_tui.control.stream_events import IdenticalCalls
from localllm_tui.control.stream_reader import AnswerReader
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HEADER = "x-localllm-identical-calls"
LOOK = {"name": "look", "parameters": {"type": "object", "properties": {"deck": {}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"deck": 3}}\n</tool_call>'
QUESTION = {"role": "user", "content": "Where is the leak?"}


def call(call_id: str, deck: int = 3, name: str = "look", spaced: bool = False) -> dict[str, Any]:
    arguments = json.dumps({"deck": deck, "side": "port"})
    if spaced:
        arguments = f'{{ "side":"port",  "deck": {deck} }}'
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def rounds(*made: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Return a question, and rounds of calls with their results."""
    messages: list[dict[str, Any]] = [QUESTION]
    for one in made:
        messages.append({"role": "assistant", "content": None, "tool_calls": [c for c, _ in one]})
        messages += ({"role": "tool", "tool_call_id": c["id"], "content": r} for c, r in one)
    return messages


def same(n: int) -> list[dict[str, Any]]:
    return rounds(*([(call(f"c{i}", spaced=i % 2 == 1), "dry")] for i in range(n)))


OTHER = [(call("x", 4), "dry")]
CASES: list[tuple[list[dict[str, Any]], int]] = [
    (same(2), 0),
    (same(3), 3),
    (same(5), 5),
    (rounds(OTHER, *([(call(f"c{i}"), "dry")] for i in range(3))), 3),
    (rounds(*([(call(f"c{i}"), "dry")] for i in range(3)), OTHER), 0),  # the loop has ended
    (rounds(*([(call(f"c{i}", name=n), "dry")] for i, n in enumerate(("look", "see", "look")))), 0),
    (rounds(*([(call(f"c{i}"), f"wet {i}")] for i in range(4))), 0),  # the results differ
    (rounds(*([(call(f"c{i}", i), "dry")] for i in range(4))), 0),  # the arguments differ
    (rounds([(call(f"c{i}"), "dry") for i in range(4)]), 0),  # one round of parallel calls
    ([*same(3), {"role": "assistant", "content": "It is dry."}], 0),
    ([*same(3), {"role": "assistant", "content": "Dry."}, QUESTION], 0),
    # Repeated calls count together with another call, and across turns.
    (rounds(*([(call(f"c{i}"), "dry"), (call(f"d{i}", i + 9), "wet")] for i in range(3))), 3),
    ([*same(2), {"role": "assistant", "content": "Dry."}, *same(1)], 3),
    ([QUESTION], 0),
]


@pytest.mark.parametrize(("messages", "times"), CASES)
def test_equal_calls_in_a_row_are_counted(messages: list[dict[str, Any]], times: int) -> None:
    found = repeated_call(normalise(messages))
    assert (found.times if found else 0) == times
    assert found is None or found.name == "look"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine([CALL])


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def body(path: str, n: int, **more: Any) -> dict[str, Any]:
    """Return the same conversation with `n` equal calls, in the dialect of `path`."""
    if path == RESPONSES:
        items: list[dict[str, Any]] = [QUESTION]
        for i in range(n):
            made = {"type": "function_call", "call_id": f"c{i}", "name": "look"}
            items.append({**made, "arguments": '{"deck": 3}'})
            items.append({"type": "function_call_output", "call_id": f"c{i}", "output": "dry"})
        return {"input": items, "tools": [{"type": "function", **LOOK}], **more}
    if path == MESSAGES:
        messages: list[dict[str, Any]] = [QUESTION]
        for i in range(n):
            used = {"type": "tool_use", "id": f"c{i}", "name": "look", "input": {"deck": 3}}
            result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": "dry"}
            messages.append({"role": "assistant", "content": [used]})
            messages.append({"role": "user", "content": [result]})
        tools = [{"name": "look", "input_schema": LOOK["parameters"]}]
        return {"messages": messages, "tools": tools, "max_tokens": 99, **more}
    return {"messages": same(n), "tools": [{"type": "function", "function": LOOK}], **more}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/api/chat"])
def test_the_header_names_the_call(http: httpx.Client, path: str) -> None:
    more = {"stream": False}
    assert HEADER not in http.post(path, json=body(path, 2, **more)).headers
    reply = http.post(path, json=body(path, 3, **more))
    assert reply.status_code == 200, reply.text
    assert reply.headers[HEADER] == "look 3 times"


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_streams_have_a_comment(http: httpx.Client, path: str) -> None:
    lines = http.post(path, json=body(path, 4, stream=True)).text.splitlines()
    (said,) = [line for line in lines if line.startswith(": identical calls")]
    assert [*AnswerReader().comment(said[2:])] == [IdenticalCalls("look", 4)]


def test_a_name_with_line_breaks_is_one_line(http: httpx.Client) -> None:
    named = "look\n\ndata: x"
    messages = rounds(*([(call(f"c{i}", name=named), "dry")] for i in range(3)))
    reply = http.post(CHAT, json={"messages": messages, "stream": True})
    assert ": identical calls look??data: x 3 times" in reply.text.splitlines()


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, "/api/chat"])
@pytest.mark.parametrize(("guard", "n", "calls"), [
    (True, 3, False), (True, 2, True), (4, 3, True), (4, 4, False), (False, 9, True),
])  # fmt: skip
def test_the_guard_ends_the_loop(
    http: httpx.Client, engine: ScriptedEngine, path: str, guard: Any, n: int, calls: bool
) -> None:
    reply = http.post(path, json=body(path, n, loop_guard=guard, stream=False))
    assert reply.status_code == 200, reply.text
    assert (
        "tool_use" in reply.text or '"tool_calls"' in reply.text or "fc_" in reply.text
    ) == calls
    # The prompt is the same with and without the guard, so it comes from the cache.
    guarded = engine.requests[-1].prompt
    http.post(path, json=body(path, n, stream=False))
    assert engine.requests[-1].prompt == guarded
    assert "x-localllm-ignored" not in reply.headers


@pytest.mark.parametrize("guard", [0, 1, 2, 65, "yes"])
def test_a_guard_out_of_range_is_refused(http: httpx.Client, guard: Any) -> None:
    reply = http.post(CHAT, json=body(CHAT, 3, loop_guard=guard))
    assert (reply.status_code, "loop_guard" in reply.text) == (400, True)
