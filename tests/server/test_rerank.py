"""Reranking over HTTP through the worker and real llama.cpp.

The scores are compared with those of llama.cpp's own server if it is available.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.serve.model_router import router_for
from localllm.load.fit_several_models import load_plans_together
from localllm.settings import Settings
from localllm_backends.llamacpp import backend_type as llamacpp
from models.tiny_bert import CTX, write_bert
from support.http_server import running_server
from support.until import until

DOCUMENTS = ["a machine", "learning is what one does", "machine learning, of course.", "paris"]
QUERY = "what is machine learning?"


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("ranker") / "ranker.gguf", pooling=4)


@pytest.fixture(scope="module")
def http(
    ranker: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    vectors = tmp_path_factory.mktemp("vectors")
    embedders = [
        write_bert(vectors / f"{name}.gguf", seed=seed) for name, seed in (("one", 1), ("two", 2))
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CONFIG", "DATA", "CACHE", "LOG"):
            patch.setenv(f"LOCALLLM_{name}_DIR", str(tmp_path_factory.mktemp(name.lower())))
        router = router_for(
            load_plans_together([str(p) for p in (tiny_model, *embedders, ranker)], Settings())
        )
    with running_server(router) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def rerank(http: httpx.Client, path: str = "/v1/rerank", **more: Any) -> httpx.Response:
    return http.post(path, json={"query": QUERY, "documents": DOCUMENTS, **more})


def test_documents_are_returned_best_first_with_their_index(http: httpx.Client) -> None:
    body = rerank(http, model="ranker").json()
    assert body.keys() == {"model", "object", "usage", "results"}
    scores = [r["relevance_score"] for r in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == 4
    assert sorted(r["index"] for r in body["results"]) == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 0
    # A document scored alone has the same score as among others.
    for result in body["results"]:
        alone = rerank(http, documents=[DOCUMENTS[result["index"]]]).json()["results"][0]
        assert alone["relevance_score"] == pytest.approx(result["relevance_score"], abs=2e-3)


def test_every_path_and_form_of_reranking_gives_the_same_results(http: httpx.Client) -> None:
    expected = rerank(http).json()["results"]
    for path in ("/rerank", "/reranking", "/v1/reranking", "/v2/rerank"):
        assert rerank(http, path).json()["results"] == expected
    as_objects = rerank(
        http, documents=[{"text": d} for d in DOCUMENTS], return_documents=True, top_n=2
    ).json()["results"]
    assert [(r["index"], r["document"]["text"]) for r in as_objects] == [
        (r["index"], DOCUMENTS[r["index"]]) for r in expected[:2]
    ]
    body = {"query": QUERY, "texts": DOCUMENTS, "return_text": True}
    tei = http.post("/rerank", json=body).json()
    assert [(r["index"], r["score"], r["text"]) for r in tei] == [
        (r["index"], r["relevance_score"], DOCUMENTS[r["index"]]) for r in expected
    ]


def test_what_can_not_be_ranked_is_refused_with_the_reason(http: httpx.Client) -> None:
    for documents in ([], None, 123, [1, 2]):
        assert rerank(http, documents=documents).status_code == 400
    too_long = rerank(http, documents=["short", "word " * CTX])
    assert too_long.status_code == 400
    assert "document 1" in too_long.json()["error"]["message"]
    assert rerank(http, documents=["short", "word " * CTX], truncate=True).status_code == 200
    chat = rerank(http, model="tiny-llama")
    assert (chat.status_code, chat.json()["error"]["hint"]) == (400, "use a reranker: ranker")
    assert http.post("/v1/embeddings", json={"model": "ranker", "input": "x"}).status_code == 400
    said = http.post("/v1/completions", json={"model": "ranker", "prompt": "x"})
    assert (said.status_code, "can't generate text" in said.json()["error"]["message"]) == (
        400,
        True,
    )


def test_several_embedding_models_are_loaded_together(http: httpx.Client) -> None:
    one, two = (
        http.post("/v1/embeddings", json={"model": name, "input": "hello"}).json()
        for name in ("one", "two")
    )
    assert (one["model"], two["model"]) == ("one", "two")
    assert one["data"][0]["embedding"] != two["data"][0]["embedding"]
    states = {
        m["id"]: (m["status"]["value"], m["capabilities"])
        for m in http.get("/v1/models").json()["data"]
    }
    assert states["one"] == states["two"] == ("loaded", ["embedding"])
    assert states["ranker"][1] == ["rerank"]


def test_marks_in_a_query_or_a_document_are_text(tmp_path: Path) -> None:
    """Markers in a query or a document are text, as in Qwen3-Reranker.

    Only the template's markers are tokens, so a document cannot end the query.
    """
    path = write_bert(tmp_path / "r.gguf", pooling=4, template="[CLS]{query}[SEP]{document}[SEP]")
    embedder = llamacpp.load_embedder(str(path), n_ctx=128)
    cls, sep = 2, 3
    rng = random.Random(1)
    for _ in range(60):
        texts = [
            "".join(
                rng.choices(
                    ["[SEP]", "[CLS]", "[", "SEP]", "a", " ", "{document}", "[S[SEP]EP]"], k=5
                )
            )
            for _ in "qd"
        ]
        tokens = embedder.tokenize_pair(*texts)
        assert [t for t in tokens if t in (cls, sep)] == [cls, sep, sep], texts
        assert not {cls, sep} & set(embedder.tokenize(texts[0])[1:-1])
    embedder.close()


def _is_up(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_scores_equal_those_of_llama_cpp(http: httpx.Client, ranker: Path) -> None:
    program = os.environ.get("LOCALLLM_LLAMA_SERVER")
    if not program:
        pytest.skip("LOCALLLM_LLAMA_SERVER names no llama-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "-m", str(ranker), "--rerank", "--port", str(port), "--no-webui"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as theirs:
            until(lambda: _is_up(theirs))
            expected, ours = rerank(theirs).json(), rerank(http).json()
    finally:
        process.terminate()
        process.wait(timeout=30)
    assert ours["usage"] == expected["usage"]
    assert [r["index"] for r in ours["results"]] == [r["index"] for r in expected["results"]]
    for a, b in zip(ours["results"], expected["results"], strict=True):
        assert a["relevance_score"] == pytest.approx(b["relevance_score"], abs=1e-3)
    assert ours.keys() == expected.keys()
