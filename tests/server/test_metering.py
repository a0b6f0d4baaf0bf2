"""A request that another server answers is charged to its key as if it had run here.

This holds whichever server reports the usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from localllm.errors import BusyError
from localllm.server.http.accounts import Account, KeyUsage, NamedKey, digest_of
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.proxy.upstreams import Upstream, Upstreams
from localllm.server.proxy.usage_meter import UsageMeter
from server.test_pool import begun, pooled
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

ANNA, OWNER = "anna-anna-anna-anna", "owner-owner-owner"
HI = [{"role": "user", "content": "Tell me something, please."}]
CHAT = {"model": "tiny", "messages": HI}
KEYS = (NamedKey("anna", digest_of(ANNA.encode())),)
ALL = ("openai", "responses", "anthropic", "ollama")
# Each dialect, as a complete reply and as a stream. The last stream reports no usage.
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"model": "tiny", "input": "Tell me something, please."}),
    ("/v1/responses", {"model": "tiny", "input": "Tell me something, please.", "stream": True}),
    ("/v1/messages", {**CHAT, "max_tokens": 50}),
    ("/v1/messages", {**CHAT, "max_tokens": 50, "stream": True}),
    ("/api/chat", {**CHAT, "stream": False}),
    ("/api/chat", CHAT),
]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(script=("one", " two", " three", " four"))


@pytest.fixture(scope="module")
def front(engine: ScriptedEngine) -> Iterator[Running]:
    """Yield a server with named keys, in front of a server that knows none of them."""
    with running_server([ServedModel("tiny", engine)]) as behind:
        upstream = Upstream("lab", behind.url + "/v1", models={"tiny": "tiny"}, speaks=ALL)
        router = ModelRouter([], upstreams=Upstreams([upstream]))
        with running_server(router, keys=KEYS, api_key=OWNER) as running:
            yield running


def used(running: Running) -> KeyUsage:
    """Return a copy of anna's usage. Each test compares it with a later one."""
    account = running.app.state.server.accounts.of(ANNA.encode())
    u = account.used
    return KeyUsage(u.requests, u.refused, u.prompt_tokens, u.cached_tokens, u.completion_tokens)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(
        url + path, json=body, headers={"authorization": f"Bearer {ANNA}"}, trust_env=False
    )


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_every_dialect_is_charged_as_on_this_server(
    front: Running, path: str, body: dict[str, Any]
) -> None:
    engine = ScriptedEngine(script=("one", " two", " three", " four"))
    with running_server([ServedModel("tiny", engine)], keys=KEYS, api_key=OWNER) as here:
        assert post(here.url, path, body).status_code == 200
        until(lambda: used(here).completion_tokens > 0)
        expected = used(here)
    before = used(front)
    assert post(front.url, path, body).status_code == 200
    until(lambda: used(front).completion_tokens > before.completion_tokens)
    now = used(front)
    assert now.prompt_tokens - before.prompt_tokens == expected.prompt_tokens
    assert now.completion_tokens - before.completion_tokens == expected.completion_tokens


def test_a_stream_that_states_no_usage_is_counted(front: Running) -> None:
    before = used(front)
    assert post(front.url, "/v1/chat/completions", {**CHAT, "stream": True}).status_code == 200
    until(lambda: used(front).completion_tokens > before.completion_tokens)
    now = used(front)
    assert 4 <= now.completion_tokens - before.completion_tokens <= 8
    assert now.prompt_tokens - before.prompt_tokens == (len("user") + len(HI[0]["content"])) // 4


def test_a_client_that_disconnects_is_charged_for_the_text_so_far(
    front: Running, engine: ScriptedEngine
) -> None:
    gate, before, script = Gate(), used(front), engine.script
    engine.script = ("one", " two", gate, " three")
    headers = {"authorization": f"Bearer {ANNA}"}
    with (
        httpx.Client(base_url=front.url, trust_env=False, headers=headers) as http,
        http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer,
    ):
        assert any("two" in line for line in answer.iter_lines())
    until(lambda: used(front).completion_tokens >= before.completion_tokens + 2)
    assert used(front).prompt_tokens > before.prompt_tokens
    gate.open()
    engine.script = script


def test_counting_and_refusals_cost_nothing(front: Running) -> None:
    before = used(front)
    assert post(front.url, "/v1/messages/count_tokens", CHAT).json()["input_tokens"] > 0
    assert (
        post(front.url, "/v1/chat/completions", {**CHAT, "temperature": "hot"}).status_code == 400
    )
    now = used(front)
    assert (now.prompt_tokens, now.completion_tokens) == (
        before.prompt_tokens,
        before.completion_tokens,
    )


def test_a_prompt_from_anthropics_cache_is_counted_as_cached() -> None:
    account = Account(NamedKey("anna"))
    meter = UsageMeter(account, 0)
    meter.begin(200, streams=True)
    start = {
        "input_tokens": 10,
        "cache_read_input_tokens": 900,
        "cache_creation_input_tokens": 40,
        "output_tokens": 1,
    }
    frames = [
        {"type": "message_start", "message": {"usage": start}},
        {"type": "message_delta", "usage": {"output_tokens": 7}},
    ]
    for frame in frames:
        meter.feed(b"data: " + json.dumps(frame).encode() + b"\n\n")
    meter.close()
    assert (
        account.used.prompt_tokens,
        account.used.cached_tokens,
        account.used.completion_tokens,
    ) == (950, 900, 7)


def test_a_request_that_was_tried_twice_is_charged_once() -> None:
    account = Account(NamedKey("anna"))
    meter = UsageMeter(account, 5)
    usage = (
        b"data: "
        b'{"type":"message_start","message":{"usage":{"input_tokens":100,"output_tokens":1}}}\n\n'
    )
    for _ in range(2):
        meter.begin(200, streams=True)
        meter.feed(usage)
    meter.feed(b'data: {"type":"message_delta","usage":{"output_tokens":9}}\n\n')
    meter.close()
    assert (account.used.prompt_tokens, account.used.completion_tokens) == (100, 9)


def test_the_front_of_a_pool_counts_by_key() -> None:
    """The front of a pool counts usage by key, because its servers know no key names."""
    with ExitStack() as stack:
        behind = [begun(stack, ServedModel("tiny", ScriptedEngine())) for _ in range(2)]
        front = stack.enter_context(pooled(*(r.url for r in behind), keys=KEYS, api_key=OWNER))
        said = post(front.url, "/v1/chat/completions", CHAT).json()
        as_owner = {"authorization": f"Bearer {OWNER}"}
        table = front.http.get("/usage.csv", headers=as_owner).text
        n = said["usage"]
        assert f"anna,1,0,{n['prompt_tokens']},0,{n['completion_tokens']},0" in table
        counters = front.http.get("/metrics", headers=as_owner).text
        assert 'localllm_key_requests_total{key="anna"} 1' in counters
        assert 'localllm_pool_active{box="0"} 0' in counters
        assert front.http.get("/usage.csv").status_code == 401


def test_a_refusal_of_every_server_comes_back_as_it_is() -> None:
    """If all servers are full, the client receives their Retry-After."""
    with ExitStack() as stack:
        engines = [ScriptedEngine() for _ in range(2)]
        behind = [begun(stack, ServedModel("tiny", e)) for e in engines]
        front = stack.enter_context(pooled(*(r.url for r in behind)))
        for engine in engines:
            engine.load_error = BusyError("the queue is full", retry_after_s=77)
        through = front.http.post("/v1/chat/completions", json=CHAT)
        assert through.status_code == 503
        assert through.headers["retry-after"] == "77"
        assert "the queue is full" in through.json()["error"]["message"]
        assert [server.app.state.server.requests for server in behind] == [1, 1]
