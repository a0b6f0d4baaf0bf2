"""Embeddings over HTTP, through the worker and real llama.cpp, in the dialects of OpenAI and
Ollama."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from localllm.cli.serve.model_router import router_for
from localllm.engine.worker.embedding import EmbeddingOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import UsageError
from localllm.load.fit_several_models import load_plans_together
from localllm.load.load_plan import load_plan_named
from localllm.server.models.router import ServedModel
from localllm.settings import Settings
from models.tiny_bert import CTX, E, write_bert
from support.http_server import Running, running_server
from support.own_server import background_server

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert") / "bert.gguf")


@pytest.fixture(scope="module")
def server(
    bert: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "DATA", "CACHE", "LOG"):
            patch.setenv(f"LOCALLLM_{name}_DIR", str(tmp_path_factory.mktemp(name.lower())))
        router = router_for(load_plans_together([str(tiny_model), str(bert)], Settings()))
    with running_server(router) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": "bert", **body})


def vector(http: httpx.Client, text: str) -> list[float]:
    found: list[float] = post(http, input=text).json()["data"][0]["embedding"]
    return found


def test_the_openai_client_in_its_strict_mode(server: Running) -> None:
    """The client uses floats here, because in base64, its default, it validates the text
    undecoded."""
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0, _strict_response_validation=True
    ) as client:
        found = client.embeddings.create(
            model="bert", input=["a", "b"], encoding_format="float", dimensions=8
        )
    assert [len(one.embedding) for one in found.data] == [8, 8]


def test_the_openai_client_reads_embeddings_as_base64_and_as_floats(server: Running) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="bert", input=["hello", "other"])  # in base64
        plain = client.embeddings.create(
            model="bert", input=["hello", "other"], encoding_format="float"
        )
    assert [d.index for d in packed.data] == [0, 1]
    assert np.allclose(packed.data[0].embedding, plain.data[0].embedding, atol=1e-6)
    assert len(plain.data[0].embedding) == E
    assert math.isclose(sum(x * x for x in plain.data[0].embedding), 1.0, abs_tol=1e-4)
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == len("hello") + len("other") + 4


def test_every_form_of_input_is_embedded(http: httpx.Client) -> None:
    tokens = [2, 10, 11, 3]
    one = post(http, input=tokens).json()
    several = post(http, input=[tokens, [2, 12, 3]]).json()
    assert len(one["data"]) == 1
    assert len(several["data"]) == 2
    assert np.allclose(one["data"][0]["embedding"], several["data"][0]["embedding"], atol=1e-3)
    assert several["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    raw = base64.b64decode(
        post(http, input=tokens, encoding_format="base64").json()["data"][0]["embedding"]
    )
    assert np.allclose(np.frombuffer(raw, dtype="<f4"), one["data"][0]["embedding"], atol=1e-3)


def test_dimensions_cut_and_make_length_one_again(http: httpx.Client) -> None:
    full = vector(http, "hello")
    short = post(http, input="hello", dimensions=8).json()["data"][0]["embedding"]
    assert len(short) == 8
    scale = math.sqrt(sum(x * x for x in full[:8]))
    assert np.allclose(short, [x / scale for x in full[:8]], atol=1e-4)
    assert len(post(http, input="hello", dimensions=E).json()["data"][0]["embedding"]) == E


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": "x", "dimensions": E + 1}, f"model is {E}"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": ""}, "empty"),
        ({"input": ["a", ""]}, "input 1 is empty"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**7]}, "vocabulary"),
        ({"input": [-1]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": None}, "input"),
        ({}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "word " * CTX}, f"the model's limit is {CTX}"),
    ],
)
def test_an_unsupported_embedding_request_is_a_400_with_the_reason(
    http: httpx.Client, body: dict[str, Any], says: str
) -> None:
    reply = post(http, **body)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"], reply.text


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    reply = post(http, input="x", user="me", oddity=1)
    assert reply.headers["x-localllm-ignored"] == "oddity"


def test_a_chat_model_refuses_embeddings_and_names_an_embedding_model(http: httpx.Client) -> None:
    reply = http.post("/v1/embeddings", json={"model": "tiny-llama", "input": "x"})
    assert reply.status_code == 400
    assert "tiny-llama generates text" in reply.json()["error"]["message"]
    assert reply.json()["error"]["hint"] == "use an embedding model: bert"
    assert http.post("/v1/embeddings", json={"input": "x"}).json()["model"] == "bert"


def test_an_embedding_model_does_not_chat(http: httpx.Client) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ):
        reply = http.post(path, json={"model": "bert", **body})
        assert reply.status_code == 400, path
        assert "can't generate text" in reply.json()["error"]["message"]
    # A request without a model name gets the first model that generates text.
    assert (
        http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1}).json()["model"]
        == "tiny-llama"
    )


def test_all_of_ollamas_embedding_requests_work(http: httpx.Client) -> None:
    whole = http.post("/api/embed", json={"model": "bert", "input": ["hello", "other"]}).json()
    assert len(whole["embeddings"]) == 2
    assert whole["prompt_eval_count"] == len("hello") + len("other") + 4
    assert np.allclose(whole["embeddings"][0], vector(http, "hello"), atol=1e-3)
    one = http.post("/api/embed", json={"model": "bert", "input": "hello", "dimensions": 4}).json()
    assert [len(v) for v in one["embeddings"]] == [4]
    older = http.post("/api/embeddings", json={"model": "bert", "prompt": "hello"}).json()
    assert np.allclose(older["embedding"], vector(http, "hello"), atol=1e-3)
    long = {"model": "bert", "input": "word " * CTX}
    assert http.post("/api/embed", json=long).json()["prompt_eval_count"] == CTX
    refused = http.post("/api/embed", json={**long, "truncate": False})
    assert (refused.status_code, "limit" in refused.json()["error"]) == (400, True)


def test_the_lists_show_that_a_model_generates_embeddings(http: httpx.Client) -> None:
    http.post("/v1/embeddings", json={"input": "x"})
    listed = {m["id"]: m for m in http.get("/v1/models").json()["data"]}
    assert listed["bert"]["capabilities"] == ["embedding"]
    assert listed["bert"]["context_length"] == CTX
    assert "embedding" not in listed["tiny-llama"]["capabilities"]
    shown = http.post("/api/show", json={"model": "bert"}).json()
    assert shown["capabilities"] == ["embedding"]
    assert 'localllm_requests_total{model="bert"}' in http.get("/metrics").text


def test_a_worker_that_dies_again_and_again_is_a_503_with_a_time(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with (
        running_server(
            [ServedModel("bert", Supervisor(EmbeddingOptions(str(bert))), embeds=True)]
        ) as running,
        httpx.Client(base_url=running.url, timeout=60) as client,
    ):
        replies = [post(client, input="x") for _ in range(5)]
    assert [r.status_code for r in replies] == [503] * 5
    assert [r.json()["error"]["code"] for r in replies] == ["worker_died"] * 4 + ["server_busy"]
    assert 1 <= int(replies[-1].headers["retry-after"]) <= 8


def test_the_files_header_decides_that_a_model_generates_embeddings(
    bert: Path, tiny_model: Path, tmp_path: Path
) -> None:
    load = load_plan_named(str(bert), Settings())
    assert load.embedding is not None
    assert load.needs_bytes > bert.stat().st_size
    assert load_plan_named(str(tiny_model), Settings()).embedding is None
    ranker = load_plan_named(str(write_bert(tmp_path / "ranker.gguf", pooling=4)), Settings())
    assert ranker.ranks
    with (
        pytest.raises(UsageError, match="generates embeddings, not text"),
        background_server(str(bert)),
    ):
        pass
