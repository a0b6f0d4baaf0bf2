"""Loading, unloading and state over HTTP, with a real engine.

The routes are those of llama.cpp's router, and its /slots and /props.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ModelRouter, ServedModel
from localllm_backends.contract import LoadSpec
from models.tiny_bert import write_bert
from support.http_server import running_server
from support.until import until


def served(name: str, path: Path) -> ServedModel:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(path), n_ctx=2048, n_seq_max=2)))
    return ServedModel(
        name, host, n_ctx=2048, details={"quant": "Q4_1", "format": "gguf", "bytes": 5}
    )


@pytest.fixture(scope="module")
def models(
    smollm2: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> ModelRouter:
    from localllm.engine.worker.embedding import EmbeddingOptions

    bert = write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")
    vectors = ServedModel("bert", Supervisor(EmbeddingOptions(str(bert))), embeds=True)
    return ModelRouter([served("smollm2", smollm2), served("tiny", tiny_model), vectors])


@pytest.fixture(scope="module")
def http(models: ModelRouter) -> Iterator[httpx.Client]:
    with running_server(models) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        yield client


def status(http: httpx.Client, name: str, path: str = "/models") -> str:
    found: dict[str, str] = {m["id"]: m["status"]["value"] for m in http.get(path).json()["data"]}
    return found[name]


def test_llama_cpps_router_loads_and_unloads(http: httpx.Client) -> None:
    for _ in range(2):  # a second request loads nothing, and one unload suffices
        assert http.post("/models/load", json={"model": "smollm2"}).json() == {"success": True}
    until(lambda: status(http, "smollm2") == "loaded")
    assert status(http, "smollm2", "/v1/models") == "loaded"
    for _ in range(2):
        assert http.post("/models/unload", json={"model": "smollm2"}).json() == {"success": True}
    assert status(http, "smollm2") == "unloaded"
    for path in ("/models/load", "/models/unload"):
        assert http.post(path, json={"model": "nobody"}).status_code == 404
        assert http.post(path, json={}).status_code == 400


def test_a_model_in_use_is_not_unloaded(http: httpx.Client, models: ModelRouter) -> None:
    model = models.resolve("tiny")
    assert (
        http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}
        ).status_code
        == 200
    )

    async def held(path: str, body: dict[str, str]) -> httpx.Response:
        with model.lease():
            return await asyncio.to_thread(http.post, path, json=body)

    refused = asyncio.run(held("/models/unload", {"model": "tiny"}))
    assert refused.status_code == 503
    assert "is answering 1 requests" in refused.json()["error"]["message"]
    assert status(http, "tiny") == "loaded"


def test_slots_show_running_and_waiting_requests_without_their_text(http: httpx.Client) -> None:
    http.post("/models/unload", json={"model": "smollm2"})
    assert http.get("/slots", params={"model": "smollm2"}).json() == []
    http.post("/v1/completions", json={"model": "smollm2", "prompt": "a", "max_tokens": 1})
    idle = http.get("/slots", params={"model": "smollm2"}).json()
    assert [(s["id"], s["is_processing"], s["n_ctx"]) for s in idle] == [
        (0, False, 2048),
        (1, False, 2048),
    ]

    body = {"model": "smollm2", "prompt": "Zanzibar is", "max_tokens": 1500, "ignore_eos": True,
        "stream": True, "n": 3,
            "temperature": 0.25}  # fmt: skip
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # a reference is kept: a deleted iterator closes the stream
        assert next(line for line in lines if line.startswith("data:"))
        # The second request joins the batch when the first has read their common prompt.
        until(
            lambda: all(
                s["is_processing"] for s in http.get("/slots", params={"model": "smollm2"}).json()
            )
        )
        reply = http.get("/slots", params={"model": "smollm2"})
        busy = reply.json()
        full = http.get("/slots", params={"model": "smollm2", "fail_on_no_slot": 1})
    assert full.status_code == 503
    assert [s["is_processing"] for s in busy] == [True, True, True]
    assert busy[2]["state"] == "waiting"
    assert {s["state"] for s in busy[:2]} <= {"prefill", "decode"}
    for slot in busy:
        assert slot["params"]["temperature"] == 0.25
        assert slot["n_prompt_tokens"] > 0
        assert (
            slot["next_token"][0]["n_decoded"] + slot["next_token"][0]["n_remain"]
            == slot["params"]["n_predict"]
        )
    assert busy[0]["next_token"][0]["n_decoded"] > 0
    assert len({s["id_task"] for s in busy}) == 3
    assert "anzibar" not in reply.text
    until(
        lambda: (
            not any(
                s["is_processing"] for s in http.get("/slots", params={"model": "smollm2"}).json()
            )
        )
    )


def test_props_describe_any_model_without_loading_it(http: httpx.Client) -> None:
    http.post("/models/unload", json={"model": "tiny"})
    props = http.get("/props", params={"model": "tiny"}).json()
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert props["model_alias"] == "tiny"
    assert props["total_slots"] >= 1
    assert status(http, "tiny") == "unloaded"


def test_the_news_of_loading_come_as_they_happen(http: httpx.Client) -> None:
    http.post("/models/unload", json={"model": "tiny"})
    with http.stream("GET", "/models/sse") as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        with httpx.Client(base_url=http.base_url, timeout=60) as second:
            second.post("/models/load", json={"model": "tiny"})
        said = []
        for event in events:  # no event comes until the state changes
            assert event["event"] == "model_status"
            if event["model"] == "tiny":
                said.append(event["data"]["status"])
            if said and said[-1] == "loaded":
                break
    assert said[-1] == "loaded"
    assert set(said) <= {"loading", "loaded"}
