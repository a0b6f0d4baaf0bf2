"""A model that runs on another server: one of our servers as the upstream of another.

Forwarded requests get the same replies.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.proxy.upstreams import PATHS, Upstream, Upstreams
from server.rows import Row, as_said
from server.rows_completions import COMPLETIONS
from server.rows_openai import OPENAI
from server.rows_others import OTHERS
from support.http_server import Running, running_server
from support.scripted_engine import BOS, Gate, ScriptedEngine
from support.until import until

ROWS = [row for row in (*OPENAI, *COMPLETIONS, *OTHERS) if row.path in PATHS]
EVERY = ("openai", "responses", "anthropic", "ollama")
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)


@pytest.fixture(scope="module")
def behind(engine: ScriptedEngine) -> Iterator[Running]:
    with running_server(
        [ServedModel("tiny", engine, aliases=("small",))], api_key="theirs"
    ) as running:
        yield running


def front(behind: Running, *local: ServedModel, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "models": {"tiny": "tiny", "small": "small", "renamed": "tiny"},
        "key": "theirs",
        **changes,
    }
    upstream = Upstream("lab", behind.url + "/v1", **values)
    return running_server(ModelRouter(list(local), upstreams=Upstreams([upstream])))


@pytest.fixture(scope="module")
def both(behind: Running) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    auth = {"authorization": "Bearer theirs"}
    with (
        front(behind, ServedModel("local", ScriptedEngine()), speaks=EVERY) as running,
        httpx.Client(base_url=running.url, trust_env=False) as through,
        httpx.Client(base_url=behind.url, trust_env=False, headers=auth) as direct,
    ):
        yield direct, through


def alike(text: str) -> str:
    """Remove the values that differ each time: ids, times and durations."""
    text = re.sub(
        r'"((?:chatcmpl|cmpl|call|fc|resp|embd|msg|toolu|rs|item|req)[-_])[0-9A-Za-z_-]+"',
        r'"\1"',
        text,
    )
    text = re.sub(r'("[a-z]+_at"): ?("[^"]*"|[0-9.]+)', r"\1:0", text)
    return re.sub(
        r'("(?:created|[a-z_]*_ms|[a-z_]*per_second|[a-z_]*_s|[a-z_]*_duration)"): '
        r"?[0-9.e+-]+",
        r"\1:0",
        text,
    )


# The long run tests every row, and a normal run each sixth.
ALL = [
    pytest.param(r, marks=[pytest.mark.long] if i % 6 else [], id=f"{r.path}: {r.name}"[:90])
    for i, r in enumerate(ROWS)
]


@pytest.mark.parametrize("row", ALL)
def test_the_tables_rows_are_answered_alike(
    row: Row, both: tuple[httpx.Client, httpx.Client], engine: ScriptedEngine
) -> None:
    """Each row of the conformance table is answered alike, directly and through the upstream.

    Status, body and notes are the same. The row's check of the answer and of the engine's
    request holds.
    """
    body = {"model": "tiny", **row.body} if isinstance(row.body, dict) else row.body
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answers = []
    for client in both:
        engine.script = row.script
        engine.requests.clear()
        answers.append(
            client.post(row.path, content=data, headers={"content-type": "application/json"})
        )
    direct, through = answers
    elsewhere = not isinstance(body, dict) or body["model"] in ("tiny", "small")
    if elsewhere:
        assert as_said(row, through, engine.requests[-1] if engine.requests else None)
    assert through.status_code == direct.status_code, through.text
    if isinstance(body, dict) and body["model"] in ("tiny", "small"):
        assert alike(through.text) == alike(direct.text)
        for name in ("content-type", "x-localllm-ignored", "x-localllm-cache"):
            assert through.headers.get(name) == direct.headers.get(name)
        assert through.headers["x-localllm-ran-on"] == "lab"


def test_a_stream_of_an_upstream_is_passed_on_unchanged(
    both: tuple[httpx.Client, httpx.Client], engine: ScriptedEngine
) -> None:
    engine.script = ("Hello", " world", "!")
    said = [client.post("/v1/chat/completions", json={**CHAT, "stream": True}) for client in both]
    assert said[1].headers["content-type"] == said[0].headers["content-type"]
    assert alike(said[1].text) == alike(said[0].text)
    assert said[1].text.rstrip().endswith("data: [DONE]")


def test_pieces_of_a_stream_are_passed_on_at_once(
    both: tuple[httpx.Client, httpx.Client], engine: ScriptedEngine
) -> None:
    gate = Gate()
    engine.script = ("first", gate, "second")
    with both[1].stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if "content" in line)
        assert any("first" in line for line in lines)
        gate.open()
        assert any("second" in line for line in lines)


def test_a_client_that_disconnects_ends_the_request_at_the_upstream(
    both: tuple[httpx.Client, httpx.Client], engine: ScriptedEngine
) -> None:
    gate, before = Gate(), len(engine.cancelled)
    engine.script = ("first", gate, "second")
    with both[1].stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        assert any("first" in line for line in answer.iter_lines())
    until(lambda: len(engine.cancelled) == before + 1)
    gate.open()


def test_the_list_shows_where_each_model_runs(both: tuple[httpx.Client, httpx.Client]) -> None:
    models = {m["id"]: m for m in both[1].get("/v1/models").json()["data"]}
    assert models["local"]["runs_on"] == "this server"
    assert {models[name]["runs_on"] for name in ("tiny", "small", "renamed")} == {"lab"}
    assert models["renamed"]["context_length"] == 4096
    assert both[1].get("/v1/models/renamed").json()["runs_on"] == "lab"
    assert "127.0.0.1" not in both[1].get("/v1/models").text


def test_a_model_may_have_another_name_at_the_upstream(
    both: tuple[httpx.Client, httpx.Client], engine: ScriptedEngine
) -> None:
    engine.script = ("fine",)
    answer = both[1].post("/v1/chat/completions", json={**CHAT, "model": "renamed"})
    assert answer.json()["choices"][0]["message"]["content"] == "fine"


def test_other_dialects_are_refused_with_the_upstreams_name_or_forwarded(
    behind: Running, engine: ScriptedEngine
) -> None:
    body = {"model": "tiny", "max_tokens": 9, "messages": CHAT["messages"]}
    engine.script = ("fine",)
    with front(behind) as running:
        answer = httpx.post(running.url + "/v1/messages", json=body, trust_env=False)
        assert answer.status_code == 400
        assert "lab" in answer.text
        assert "/v1/messages" in answer.text
    with front(behind, speaks=("openai", "anthropic")) as running:
        answer = httpx.post(running.url + "/v1/messages", json=body, trust_env=False)
        assert answer.json()["content"][0]["text"] == "fine"


def test_a_local_model_is_used_first_and_an_upstream_only_if_spill_is_set(
    behind: Running, engine: ScriptedEngine
) -> None:
    engine.script = ("from the lab",)
    body = {**CHAT, "stream": True}
    for spill, places in ((False, [None, None]), (True, [None, "lab"])):
        gate = Gate()
        local = ServedModel("tiny", ScriptedEngine(script=("here", gate), n_seq_max=1))
        with (
            front(behind, local, spill=spill) as running,
            httpx.Client(base_url=running.url, trust_env=False) as http,
        ):
            with http.stream("POST", "/v1/chat/completions", json=body) as first:
                lines = first.iter_lines()  # a deleted iterator closes the answer
                assert any("here" in line for line in lines)
                with http.stream("POST", "/v1/chat/completions", json=body) as second:
                    assert [a.headers.get("x-localllm-ran-on") for a in (first, second)] == places
            gate.open()


def test_an_unreachable_upstream_is_an_error_without_its_address_and_key() -> None:
    gone = Upstream("gone", "http://127.0.0.1:9/v1", models={"tiny": "tiny"}, key="secret")
    with running_server(ModelRouter([], upstreams=Upstreams([gone]))) as running:
        answer = httpx.post(running.url + "/v1/chat/completions", json=CHAT, trust_env=False)
        assert answer.status_code == 502
        assert answer.json()["error"]["code"] == "upstream_failed"
        assert "gone" in answer.text
        assert "127.0.0.1" not in answer.text
        assert "secret" not in answer.text


def breaking_off(said: bytes) -> tuple[socket.socket, threading.Thread]:
    """Start a server that breaks off its answer.

    It sends the head of a stream and `said` to one request, and closes.
    """
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listening, listening.accept()[0] as line:
            line.recv(65536)
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: "
                b"chunked\r\n\r\n"
            )
            line.sendall(head + (b"%x\r\n%b\r\n" % (len(said), said) if said else b""))

    thread = threading.Thread(target=answer)
    thread.start()
    return listening, thread


def test_an_upstream_that_breaks_off_causes_an_error_after_its_text() -> None:
    listening, thread = breaking_off(b'data: {"first": 1}\n\n')
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    upstream = Upstream("brittle", url, models={"tiny": "tiny"})
    with running_server(ModelRouter([], upstreams=Upstreams([upstream]))) as running:
        answer = httpx.post(
            running.url + "/v1/chat/completions", json={**CHAT, "stream": True}, trust_env=False
        )
    frames = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]
    assert frames[0] == {"first": 1}
    assert frames[1]["error"]["code"] == "upstream_failed"
    thread.join()


def test_the_models_that_an_upstream_lists_are_offered(
    behind: Running, engine: ScriptedEngine
) -> None:
    engine.script = ("listed",)
    with (
        front(behind, models={}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as http,
    ):
        assert (
            http.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
            == "listed"
        )
        assert [m["id"] for m in http.get("/v1/models").json()["data"]] == ["tiny", "small"]
        missing = http.post("/v1/chat/completions", json={**CHAT, "model": "nobody"})
        assert missing.status_code == 404
        assert missing.json()["error"]["message"].endswith("served: tiny, small")
        misspelt = http.post("/v1/chat/completions", json={**CHAT, "model": "smal"})
        assert misspelt.json()["error"]["hint"] == "did you mean small?"


def test_an_ollama_client_finds_models_that_its_dialect_can_reach(
    both: tuple[httpx.Client, httpx.Client],
) -> None:
    listed = {m["name"]: m for m in both[1].get("/api/tags").json()["models"]}
    assert set(listed) == {"local", "tiny", "small", "renamed"}
    assert listed["renamed"]["remote_host"] == "lab"
    assert (
        "completion" in both[1].post("/api/show", json={"model": "renamed"}).json()["capabilities"]
    )


def test_an_ollama_client_finds_no_model_that_its_dialect_cannot_reach(behind: Running) -> None:
    with front(behind) as running:
        assert httpx.get(running.url + "/api/tags", trust_env=False).json() == {"models": []}
