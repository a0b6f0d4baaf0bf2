"""Pulling and deleting models over HTTP.

Both are refused unless the user allows them. Progress is reported in Ollama's format, and a
client that disconnects ends the pull.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from localllm.errors import DownloadError, ModelNotFoundError
from localllm.server.models.router import ServedModel
from localllm.server.models.served import StoreProgress
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

PULL, DELETE = "/api/pull", "/api/delete"
SHA256 = "ab" * 32


MOMENTS = [
    StoreProgress("listing"), StoreProgress("downloading", 0, 100, "f" * 40),
    StoreProgress("downloading", 10, 100, SHA256),
    StoreProgress("downloading", 100, 100, SHA256), StoreProgress("verifying", 100, 100, SHA256),
    StoreProgress("done", 100, 100),
]  # fmt: skip


@dataclass
class FakeStore:
    """A store that reports MOMENTS. `hold` makes it wait in the middle until the client has
    left."""

    error: Exception | None = None
    hold: bool = False
    pulled: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def pull(self, ref: str, on_progress: Callable[[StoreProgress], None]) -> None:
        self.pulled.append(ref)
        try:
            for moment in MOMENTS:
                on_progress(moment)
            while self.hold:
                on_progress(MOMENTS[1])
            if self.error is not None:
                raise self.error
        finally:
            self.ended.set()

    def remove(self, ref: str) -> None:
        if self.error is not None:
            raise self.error
        self.removed.append(ref)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def http(store: FakeStore, engine: ScriptedEngine):
    with (
        running_server([ServedModel("tiny", engine)], store=store) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def delete(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return http.request("DELETE", DELETE, json=body)


def test_pulling_is_refused_until_allowed_and_the_refusal_names_the_option() -> None:
    with (
        running_server({"tiny": ScriptedEngine()}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as http,
    ):
        for reply in (http.post(PULL, json={"model": "x"}), delete(http, {"model": "tiny"})):
            assert reply.status_code == 400
            assert "--allow-pull" in reply.json()["error"]
        assert http.post("/api/create", json={"model": "x"}).status_code == 400


def test_a_download_streams_progress_in_ollamas_format(
    http: httpx.Client, store: FakeStore
) -> None:
    reply = http.post(PULL, json={"model": "org/name:Q4_K_M"})
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert store.pulled == ["org/name:Q4_K_M"]
    assert lines[0] == {"status": "pulling manifest"}
    assert lines[-3:] == [
        {"status": "verifying sha256 digest"}, {"status": "writing manifest"},
        {"status": "success"},
    ]  # fmt: skip
    bars = [line for line in lines if "digest" in line]
    assert {line["digest"] for line in bars} == {f"sha256:{SHA256}"}
    assert {line["status"] for line in bars} == {f"pulling {SHA256[:12]}"}
    assert bars[-1]["completed"] == bars[-1]["total"] == 100


def test_a_pull_without_streaming_and_with_the_older_field_name_works(
    http: httpx.Client, store: FakeStore
) -> None:
    reply = http.post(PULL, json={"name": "x", "stream": False})
    assert reply.json() == {"status": "success"}
    assert store.pulled == ["x"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_pull_returns_the_error(
    http: httpx.Client, store: FakeStore, stream: bool
) -> None:
    store.error = DownloadError("the disk is full")
    reply = http.post(PULL, json={"model": "x", "stream": stream})
    assert json.loads(reply.text.splitlines()[-1]) == {"error": "the disk is full"}


def test_a_pull_or_delete_without_a_model_is_refused(http: httpx.Client, store: FakeStore) -> None:
    for body in ({}, {"model": " "}, {"model": "x", "insecure": True}):
        assert http.post(PULL, json=body).status_code == 400, body
    assert delete(http, {}).status_code == 400
    assert store.pulled == store.removed == []


def test_a_client_that_disconnects_ends_the_download(http: httpx.Client, store: FakeStore) -> None:
    store.hold = True
    with http.stream("POST", PULL, json={"model": "x"}) as reply:
        pieces = reply.iter_raw()
        assert next(pieces)
        assert not store.ended.is_set()
    assert store.ended.wait(20)


def test_a_removed_model_is_unloaded_first(
    http: httpx.Client, store: FakeStore, engine: ScriptedEngine
) -> None:
    http.post("/api/chat", json={}).raise_for_status()
    assert delete(http, {"model": "tiny"}).status_code == 200
    assert store.removed == ["tiny"]
    assert engine.closed
    assert http.get("/api/ps").json()["models"] == []


def test_a_model_that_answers_is_not_removed(
    http: httpx.Client, store: FakeStore, engine: ScriptedEngine
) -> None:
    gate = Gate()
    engine.script = ["Hel", gate, "lo"]
    with http.stream(
        "POST", "/api/chat", json={"messages": [{"role": "user", "content": "hi"}]}
    ) as reply:
        lines = reply.iter_lines()
        assert "Hel" in next(lines)
        with httpx.Client(base_url=http.base_url, trust_env=False) as other:
            assert delete(other, {"model": "tiny"}).status_code == 503
        gate.open()
        assert '"done": true' in list(lines)[-1]
    assert store.removed == []


def test_an_unknown_model_is_not_found(http: httpx.Client, store: FakeStore) -> None:
    store.error = ModelNotFoundError("no model 'x'")
    reply = delete(http, {"model": "x"})
    assert (reply.status_code, reply.json()) == (404, {"error": "no model 'x'"})
