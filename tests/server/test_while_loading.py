"""Requests while a model loads.

The server answers questions about itself at once. Other requests wait and are answered, or get
the load's error.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.worker import LoadProgress, ModelWorker, PlannedModel
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.until import until

HI = [{"role": "user", "content": "Say hi"}]


class Gate:
    """A replacement for the memory query before a real load. It blocks until the test opens it."""

    def __init__(self) -> None:
        self.asked, self._open = threading.Event(), threading.Event()

    def __call__(self) -> int:
        self.asked.set()
        assert self._open.wait(60)
        return 10**12

    def open(self) -> None:
        self._open.set()


def worker(path: Path, gate: Gate | None = None) -> Supervisor[Any]:
    options = WorkerOptions(
        LoadSpec(path=str(path), n_ctx=512, n_seq_max=4), engine={"planned_bytes": 1}
    )
    return Supervisor(options, available=gate)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def test_while_a_model_loads_status_routes_answer_and_requests_wait(
    smollm2: Path, tiny_model: Path, gate: Gate
) -> None:
    slow, quick = (
        ServedModel("slow", worker(smollm2, gate)),
        ServedModel("quick", worker(tiny_model)),
    )
    with (
        running_server(ModelRouter([slow, quick]), preload=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(4) as pool,
    ):
        assert gate.asked.wait(30)
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert 0 <= health.json()["progress"] < 1
        # llama.cpp's clients look for this body while they wait for a 200.
        assert health.json()["error"] == {
            "code": 503,
            "message": "Loading model",
            "type": "unavailable_error",
        }
        states = {m["id"]: m["status"]["value"] for m in http.get("/v1/models").json()["data"]}
        assert states == {"slow": "loading", "quick": "unloaded"}

        body = {"model": "slow", "messages": HI, "max_tokens": 4, "temperature": 0}
        whole = pool.submit(http.post, "/v1/chat/completions", json=body)
        again = pool.submit(http.post, "/v1/chat/completions", json=body)
        # Another model is served while this one loads.
        other = {"model": "quick", "prompt": "a", "max_tokens": 2, "ignore_eos": True}
        assert http.post("/v1/completions", json=other).json()["usage"]["completion_tokens"] == 2
        assert not whole.done()
        with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            assert stream.status_code == 200
            lines = stream.iter_lines()
            assert next(lines) == ": loading"
            gate.open()
            data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        streamed = "".join(c["delta"].get("content") or "" for d in data for c in d["choices"])
        assert whole.result().status_code == 200
        said = {r.result().json()["choices"][0]["message"]["content"] for r in (whole, again)}
        assert said == {streamed}
        assert slow.worker.host.loads == 1  # type: ignore[attr-defined]
        assert (http.get("/health").status_code, http.get("/health").json()) == (
            200,
            {"status": "ok"},
        )


def test_a_failed_load_is_reported_and_other_models_are_served(
    tiny_model: Path, tmp_path: Path, gate: Gate
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:3000])
    models = [ServedModel("broken", worker(broken, gate)), ServedModel("sound", worker(tiny_model))]
    with (
        running_server(ModelRouter(models), preload=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(2) as pool,
    ):
        assert gate.asked.wait(30)
        body = {"model": "broken", "messages": HI, "max_tokens": 1}
        waiting = pool.submit(http.post, "/v1/chat/completions", json=body)
        streaming = pool.submit(http.post, "/v1/chat/completions", json={**body, "stream": True})
        # Both requests wait now, so both get the result of the load.
        until(lambda: models[0].worker.in_use >= 3)
        gate.open()
        assert waiting.result().status_code == 422
        assert waiting.result().json()["error"]["code"] == "bad_model_file"
        assert "bad_model_file" in streaming.result().text
        sound = {"model": "sound", "prompt": "a", "max_tokens": 1, "ignore_eos": True}
        assert http.post("/v1/completions", json=sound).status_code == 200
        assert http.get("/health").json() == {"status": "ok"}
        states = {m["id"]: m["status"] for m in http.get("/v1/models").json()["data"]}
        assert states["broken"] == {"value": "unloaded", "failed": True}


def test_health_reports_that_no_model_could_be_loaded(tiny_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(tiny_model.read_bytes()[:3000])
    with (
        running_server([ServedModel("broken", worker(broken))], preload=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 422
        assert (http.get("/health").status_code, http.get("/health").json()["status"]) == (
            503,
            "error",
        )


def test_a_load_that_all_clients_left_ends_and_the_model_works_later(
    smollm2: Path, gate: Gate
) -> None:
    model = ServedModel("slow", worker(smollm2, gate))
    with running_server([model]) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as stream:
            assert next(stream.iter_lines()) == ": loading"
        gate.open()
        until(lambda: not model.worker.loading)
        assert model.worker.in_use == 0
        reply = http.post(
            "/v1/completions", json={"prompt": "a", "max_tokens": 1, "ignore_eos": True}
        )
        assert reply.json()["usage"]["completion_tokens"] == 1


class HalfLoaded:
    """A host whose load is at 43 %."""

    def __init__(self) -> None:
        self.loading = LoadProgress()

    async def engine(self) -> Any:
        self.loading(0.43)
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
        ("/completion", {"prompt": "a"}),
    ],
)
def test_a_waiting_stream_gets_the_share_that_is_loaded(path: str, body: dict[str, Any]) -> None:
    host = HalfLoaded()
    slow = ServedModel("slow", worker=ModelWorker("slow", PlannedModel(host, loading=host.loading)))
    with (
        running_server([slow], grace_s=0.05, keepalive_s=0.2) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        http.stream("POST", path, json={**body, "stream": True}) as stream,
    ):
        comments = (line for line in stream.iter_lines() if line.startswith(": "))
        assert ": loading, 43%" in (next(comments), next(comments))
