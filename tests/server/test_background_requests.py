"""Background requests of agents, which no user waits for, run at low priority.

They are recognised by their headers, or by their form if a request with tools is running.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Request
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CLASS, SUBAGENT = "x-claude-code-request-class", "x-openai-subagent"


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 64, **more}


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> ScriptedEngine:
    def script(request: Request) -> list[Any]:
        return [gate, "Done."] if "Work" in str(request.prompt) else ["Title"]

    return ScriptedEngine(script)


@pytest.fixture
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def priority_of(
    http: httpx.Client, engine: ScriptedEngine, sent: dict[str, Any], **headers: str
) -> int:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    reply = http.post(CHAT, json=sent, headers={"user-agent": "agent/1.0", **named})
    assert reply.status_code == 200, reply.text
    priority = engine.requests[-1].generation.priority
    assert (reply.headers.get("x-localllm-priority") == "low") == (priority < 0)
    return priority


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({CLASS: "auxiliary"}, -1),
        ({CLASS: "main"}, 0),
        ({CLASS: "subagent"}, 0),
        ({CLASS: "compaction"}, 0),
        ({SUBAGENT: "memory_consolidation"}, -1),
        ({SUBAGENT: "review"}, 0),
        ({"x-openai-memgen-request": "true"}, -1),
        ({}, 0),
    ],
    ids=str,
)
def test_a_header_names_the_purpose(
    http: httpx.Client, engine: ScriptedEngine, headers: dict[str, str], priority: int
) -> None:
    assert priority_of(http, engine, body("Hi", tools=TOOLS), **headers) == priority
    # A priority that the client sets overrides the detection.
    sent = body("Hi", service_tier="priority")
    assert priority_of(http, engine, sent, **headers) == 1


def test_a_short_request_beside_an_agents_one(
    http: httpx.Client, engine: ScriptedEngine, gate: Gate
) -> None:
    title = body("A title, please.")
    assert priority_of(http, engine, title) == 0

    def work() -> None:
        http.post(CHAT, json=body("Work.", tools=TOOLS), headers={"user-agent": "agent/1.0"})

    agent = threading.Thread(target=work)
    agent.start()
    assert gate.reached.wait(30)
    assert engine.requests[-1].generation.priority == 0
    assert priority_of(http, engine, title) == -1
    # A user may wait for a request that is longer, has tools or comes from another program.
    assert priority_of(http, engine, {**title, "max_tokens": 4000}) == 0
    assert priority_of(http, engine, {**title, "max_tokens": None}) == 0
    assert priority_of(http, engine, {**title, "tools": TOOLS}) == 0
    assert priority_of(http, engine, title, user_agent="editor/2") == 0
    gate.open()
    agent.join(30)
    assert priority_of(http, engine, title) == 0


@pytest.mark.parametrize("agent", ["", "curl/8.5.0", "python-httpx/0.28.1", "Go-http-client/1.1"])
def test_a_short_request_of_an_unknown_program(
    http: httpx.Client, engine: ScriptedEngine, gate: Gate, agent: str
) -> None:
    """A short request of an unknown program keeps normal priority.

    It may be unrelated to the running request with tools. At low priority it would wait until
    that request's prompt is read, and then for 25 of its steps.
    """
    sent = {"json": body("Work.", tools=TOOLS), "headers": {"user-agent": agent}}
    other = threading.Thread(target=http.post, args=(CHAT,), kwargs=sent)
    other.start()
    assert gate.reached.wait(30)
    assert priority_of(http, engine, body("Hi"), user_agent=agent) == 0
    gate.open()
    other.join(30)


def test_short_requests_of_a_script_do_not_slow_each_other(
    http: httpx.Client, engine: ScriptedEngine, gate: Gate
) -> None:
    """If no request with tools is running, short requests keep the same priority."""
    threads = []
    for _ in range(3):
        sent = {"json": body("Work."), "headers": {"user-agent": "script/1.0"}}
        threads.append(threading.Thread(target=http.post, args=(CHAT,), kwargs=sent))
        threads[-1].start()
    assert gate.reached.wait(30)
    gate.open()
    for thread in threads:
        thread.join(30)
    assert [request.generation.priority for request in engine.requests] == [0, 0, 0]
