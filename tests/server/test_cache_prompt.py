"""`cache_prompt: false` with a real engine, over HTTP and the worker process.

The request reuses no KV of the prefix cache or of a running request, and leaves none for others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(few_layers: Path) -> Iterator[Running]:
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=4096, n_seq_max=4)))
    with running_server({"smollm2": supervisor}) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, trust_env=False, timeout=120) as client:
        yield client


def conversation(name: str) -> list[dict[str, str]]:
    """Return a conversation of about 100 tokens that differs from all others at its first token."""
    rules = (
        f"{name} is a careful librarian. "
        + ("She knows every book of the town, and tells where it stands. ") * 6
    )
    return [{"role": "system", "content": rules}, {"role": "user", "content": f"Who is {name}?"}]


def cached(http: httpx.Client, name: str, **more: Any) -> int:
    """Return how many prompt tokens of the conversation were cached."""
    body = {"messages": conversation(name), "temperature": 0, "max_tokens": 3, **more}
    r = http.post(CHAT, json=body)
    assert r.status_code == 200, r.text
    usage = r.json()["usage"]
    assert usage["prompt_tokens"] > 80
    said = usage["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(said, int)
    return said


@contextmanager
def answering(http: httpx.Client, name: str, **more: Any) -> Iterator[None]:
    """Keep an answer to the conversation running during the block."""
    body = {
        "messages": conversation(name), "temperature": 0, "stream": True, "ignore_eos": True,
        "max_tokens": 3000, **more,
    }  # fmt: skip
    with http.stream("POST", CHAT, json=body) as r:
        lines = (line for line in r.iter_lines() if line.startswith("data: {"))
        next(line for line in lines if json.loads(line[6:])["choices"][0]["delta"].get("content"))
        yield
        assert json.loads(next(lines)[6:])["choices"][0]["finish_reason"] is None  # still running


def test_cached_kv_is_not_used_without_cache_prompt(http: httpx.Client) -> None:
    assert cached(http, "Ada") < 16
    assert cached(http, "Ada") > 80  # the KV is cached, and other requests find it
    for _ in range(2):
        assert cached(http, "Ada", cache_prompt=False) == 0
    assert cached(http, "Ada") > 80  # the KV is still cached


def test_a_request_without_cache_prompt_adds_no_kv_to_the_cache(http: httpx.Client) -> None:
    for _ in range(2):
        assert cached(http, "Berta", cache_prompt=False) == 0
    assert cached(http, "Berta") < 16


def test_a_running_requests_prefix_is_not_used_without_cache_prompt(http: httpx.Client) -> None:
    with answering(http, "Clara"):
        assert cached(http, "Clara", cache_prompt=False) == 0
        assert cached(http, "Clara") > 80


def test_a_prefix_of_a_request_without_cache_prompt_is_not_shared(http: httpx.Client) -> None:
    with answering(http, "Dora", cache_prompt=False):
        assert cached(http, "Dora") < 16


def test_a_tool_call_in_parts_adds_no_kv_to_the_cache_either(http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "find_book", "parameters": {"type": "object"}}}
    call = {"tools": [tool], "tool_choice": "required", "max_tokens": 24}
    assert cached(http, "Emma", cache_prompt=False, **call) == 0
    assert cached(http, "Emma", **call) < 16


def test_the_reply_states_that_the_request_disabled_the_cache(http: httpx.Client) -> None:
    body = {"messages": conversation("Fanny"), "max_tokens": 1, "cache_prompt": False}
    assert "disabled the cache" in http.post(CHAT, json=body).headers["x-localllm-cache"]
