"""A request's memory is free after the answer, without waiting for Python's cycle collector."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any

import pytest

from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

CHAT = "/v1/chat/completions"
MARK = "a text that only this request holds "
TEXT = MARK * 10_000
MESSAGES = [{"role": "user", "content": TEXT}]
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "hiccup"}}}

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "answered": (CHAT, {"messages": MESSAGES}, 200),
    "streamed": (CHAT, {"messages": MESSAGES, "stream": True}, 200),
    "responses": ("/v1/responses", {"input": TEXT}, 200),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, 200),
    "completion": ("/v1/completions", {"prompt": TEXT}, 200),
    "ollama": ("/api/chat", {"model": "tiny", "messages": MESSAGES}, 200),
    "unknown model": (CHAT, {"messages": MESSAGES, "model": "other"}, 404),
    "invalid value": (CHAT, {"messages": MESSAGES, "top_p": "x"}, 400),
    "invalid schema": (
        CHAT,
        {"messages": MESSAGES, "response_format": JSON_SCHEMA},
        400,
    ),
    "streamed, invalid schema": (
        CHAT,
        {"messages": MESSAGES, "response_format": JSON_SCHEMA, "stream": True},
        400,
    ),
    "longer than a conversation may be": (
        CHAT,
        {"messages": [{"role": "user", "content": MARK * 300_000}]},
        400,
    ),
}


@pytest.fixture(scope="module")
def http() -> Iterator[tuple[Running, ScriptedEngine]]:
    engine = ScriptedEngine(n_ctx=2**20, n_ctx_train=2**20)
    with running_server({"tiny": engine}) as running:
        yield running, engine


@contextmanager
def kept_garbage() -> Iterator[None]:
    """Disable Python's automatic collection, and keep objects in cycles in `gc.garbage`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def texts_in_cycles() -> int:
    """Return how many copies of the request's text only the collector could free."""
    gc.collect()
    inner = [held for found in gc.garbage for held in gc.get_referents(found)]
    # Dictionaries that contain only texts are not tracked.
    inner += [deeper for held in inner if type(held) is dict for deeper in held.values()]
    return sum(isinstance(text, str) and MARK in text for text in inner)


def sent(running: Running, path: str, body: dict[str, Any]) -> HTTPConnection:
    """Return a connection on which the request was sent."""
    connection = HTTPConnection("127.0.0.1", running.port, timeout=60)
    data = json.dumps({"model": "tiny", **body}).encode()
    connection.request("POST", path, data, {"content-type": "application/json"})
    return connection


def post(running: Running, path: str, body: dict[str, Any]) -> int:
    connection = sent(running, path, body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.mark.parametrize("name", CASES)
def test_an_answered_request_holds_no_memory(
    http: tuple[Running, ScriptedEngine], name: str
) -> None:
    running, engine = http
    path, body, status = CASES[name]
    post(running, path, body)  # causes the imports and caches of a first request
    engine.requests.clear()
    with kept_garbage():
        assert post(running, path, body) == status
        until(lambda: engine.running == 0)
        engine.requests.clear()
        assert texts_in_cycles() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_its_client_left_holds_no_memory(stream: bool) -> None:
    endless = Gate()
    engine = ScriptedEngine(("Hello", endless), n_ctx=2**20, n_ctx_train=2**20)
    with running_server({"tiny": engine}) as running, kept_garbage():
        connection = sent(running, CHAT, {"messages": MESSAGES, "stream": stream})
        until(lambda: engine.running == 1)
        connection.close()
        until(lambda: engine.running == 0)
        engine.requests.clear()
        assert texts_in_cycles() == 0
