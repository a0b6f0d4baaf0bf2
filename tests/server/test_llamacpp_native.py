"""Paths and fields of llama.cpp's own API that editors and pi's provider depend on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Failure
from localllm.engine.worker.embedding import EmbeddingOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ServedModel
from models.tiny_bert import write_bert
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

USER = [{"role": "user", "content": "hi"}]
CHAT, NATIVE = "/v1/chat/completions", "/completion"
PER_TOKEN = {"prompt_per_token_ms", "predicted_per_token_ms", "prompt_per_second"}


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, trust_env=False, timeout=60)


def events(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = post(url, {**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"m": ScriptedEngine(["one\n", "two"])}) as running:
        yield running


@pytest.mark.parametrize("path", [NATIVE, "/completions"])
def test_a_completion_has_its_text_prompt_and_facts(server: Running, path: str) -> None:
    got = post(server.url + path, {"prompt": "The sky", "n_predict": 4}).json()
    assert got["content"].startswith("one")
    assert (got["prompt"], got["id_slot"], got["has_new_line"]) == ("The sky", -1, True)
    assert set(got["timings"]) >= PER_TOKEN
    ids = list(b"The sky")
    assert post(server.url + NATIVE, {"prompt": ids}).json()["prompt"] == "The sky"
    mixed = ["a", [98], {"prompt_string": "c"}]
    several = post(server.url + NATIVE, {"prompt": mixed}).json()
    assert [one["prompt"] for one in several] == ["a", "b", "c"]


@pytest.mark.parametrize("path", [NATIVE, "/completions"])
def test_openai_s_names_are_read_as_in_llama_cpp(server: Running, path: str) -> None:
    asked = {"prompt": "x", "max_tokens": 1, "n": 2, "logprobs": 3}
    reply = post(server.url + path, asked)
    assert "x-localllm-ignored" not in reply.headers
    for answer in reply.json():
        assert (answer["tokens_predicted"], answer["stop_type"]) == (1, "limit")
        assert answer["generation_settings"]["n_probs"] == 3
        assert len(answer["completion_probabilities"][0]["top_logprobs"]) == 3
    own = {"n_predict": 2, "n_cmpl": 1, "n_probs": 1}
    answer = post(server.url + path, asked | own).json()
    assert (answer["tokens_predicted"], answer["generation_settings"]["n_probs"]) == (2, 1)


def test_the_settings_of_a_completion_are_llama_cpp_s(server: Running) -> None:
    sent = {"prompt": "x", "ignore_eos": True, "logit_bias": [[5, -1.5]]}
    settings = post(server.url + NATIVE, sent).json()["generation_settings"]
    assert {"token": 5, "bias": -1.5} in settings["logit_bias"]
    assert {"token": 257, "bias": None} in settings["logit_bias"]
    plain = post(server.url + NATIVE, {"prompt": "x"}).json()["generation_settings"]
    assert (plain["logit_bias"], plain["adaptive_target"], plain["mirostat"]) == ([], -1.0, 0)


def test_a_stream_always_has_the_tokens_of_its_text(server: Running) -> None:
    got = events(server.url + NATIVE, {"prompt": "x"})
    assert [bytes(e["tokens"]).decode() for e in got[:-1]] == [e["content"] for e in got[:-1]]
    assert (got[-1]["has_new_line"], got[-1]["prompt"]) == (True, "x")


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", NATIVE, "/v1/responses"])
def test_progress_and_timings_come_if_they_are_wanted(server: Running, path: str) -> None:
    body = {"messages": USER} if path == CHAT else {"prompt": "hello"}
    if path == "/v1/responses":
        body = {"input": "hello"}
    plain = events(server.url + path, body)
    assert not any("prompt_progress" in event for event in plain)
    got = events(server.url + path, {**body, "return_progress": True, "timings_per_token": True})
    reports = [event["prompt_progress"] for event in got if "prompt_progress" in event]
    assert reports[0]["processed"] == reports[0]["cache"] == 0
    assert reports[-1]["processed"] == reports[-1]["total"] > 0
    assert [set(report) for report in reports] == [{"total", "cache", "processed", "time_ms"}] * 2
    timed = [event for event in got if "timings" in event]
    assert len(timed) >= 2
    assert all(set(event["timings"]) >= PER_TOKEN for event in timed)


def test_the_first_chunk_has_the_role_and_no_content(server: Running) -> None:
    first = events(server.url + CHAT, {"messages": USER})[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert first["system_fingerprint"].startswith("b")


def test_verbose_shows_the_prompt(server: Running) -> None:
    got = post(server.url + CHAT, {"messages": USER, "verbose": True}).json()
    assert "hi" in got["__verbose"]["prompt"]
    assert "__verbose" not in post(server.url + CHAT, {"messages": USER}).json()


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/chat/completions"])
def test_a_chat_s_tokens_can_be_counted(server: Running, path: str) -> None:
    url = f"{server.url}{path}/input_tokens"
    assert post(url, {"messages": USER}).json()["input_tokens"] > 2


def test_a_prompt_that_is_too_long_names_both_counts() -> None:
    engine = ScriptedEngine(n_ctx=64)
    with running_server({"m": engine}) as running:
        error = post(running.url + NATIVE, {"prompt": "x" * 100}).json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "exceed_context_size_error",
        100,
        64,
    )
    assert error["code"] == "context_length_exceeded"
    assert "exceeds the available context size" in error["message"]


@pytest.mark.parametrize("schema", [123, {"type": 123}, {"type": "hiccup"}])
def test_an_invalid_schema_is_refused(server: Running, schema: Any) -> None:
    form = {"type": "json_object", "schema": schema}
    for limit in ({}, {"max_tokens": 0}):
        body = {"messages": USER, "response_format": form, **limit}
        reply = post(server.url + CHAT, body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "response_format"


def test_many_probabilities_are_allowed_only_for_a_short_answer() -> None:
    engine = ScriptedEngine(n_vocab=500)
    with running_server({"m": engine}) as running:
        many = {"prompt": "x", "n_probs": 1_000_000}
        assert post(running.url + NATIVE, many).status_code == 400
        assert post(running.url + NATIVE, {**many, "n_predict": 2}).status_code == 200
    assert engine.requests[-1].generation.logprobs == 500


def test_the_list_of_models_is_llama_cpp_s_too() -> None:
    with running_server({"m": ScriptedEngine(vision=True)}) as running:
        post(running.url + NATIVE, {"prompt": "x"})
        for path in ("/models", "/v1/models"):
            got = httpx.get(running.url + path, trust_env=False).json()
            assert got["models"][0]["capabilities"] == ["completion", "multimodal"]
            assert got["models"][0]["name"] == got["data"][0]["id"] == "m"
            assert got["data"][0]["source"] == "preset"
        props = httpx.get(running.url + "/props", trust_env=False).json()
    assert (props["models_autoload"], props["is_sleeping"]) == (True, False)


def test_metrics_have_llama_cpp_s_names(server: Running) -> None:
    post(server.url + NATIVE, {"prompt": "x"})
    reply = httpx.get(server.url + "/metrics", trust_env=False)
    assert reply.headers["process-start-time-unix"].isdigit()
    named = {line.split()[2] for line in reply.text.splitlines() if line.startswith("# HELP")}
    typed = [line for line in reply.text.splitlines() if line.startswith("# TYPE llamacpp:")]
    assert {line.split()[2] for line in typed} == named
    assert "llamacpp:tokens_predicted_total" in named


def test_a_failure_within_a_stream_has_both_counts_too() -> None:
    gone = Failure("", "worker_died", "gone")
    with running_server({"m": ScriptedEngine(["a", gone])}) as running:
        last = events(running.url + NATIVE, {"prompt": "x"})[-1]
    assert last["error"]["code"] == "worker_died"


# --- embeddings


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file: Path = write_bert(tmp_path_factory.mktemp("bert") / "tiny.gguf")
    model = ServedModel("e", Supervisor(EmbeddingOptions(str(file))), embeds=True)
    with running_server([model]) as running:
        yield running


ONE = [
    [12, 34, "text", 56],
    {"prompt_string": "text"},
    {"content": [{"type": "text", "text": "t"}]},
]
SEVERAL = [["a", [12, 34]], [[12, 34], [12, "text", 34]], ["a", ONE[1], ONE[2]]]


@pytest.mark.parametrize(
    ("sent", "n"), [*[(one, 1) for one in ONE], *[(many, len(many)) for many in SEVERAL]]
)
def test_inputs_of_embeddings_may_be_mixed(embedder: Running, sent: Any, n: int) -> None:
    reply = post(embedder.url + "/v1/embeddings", {"input": sent})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == n
    native = post(embedder.url + "/embedding", {"content": sent}).json()
    assert [entry["index"] for entry in native] == list(range(n))
    assert native[0]["embedding"][0] == reply.json()["data"][0]["embedding"]


def test_text_parts_are_embedded_as_one_text(embedder: Running) -> None:
    parts = {"content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]}
    data = post(embedder.url + "/v1/embeddings", {"input": ["hello world", parts]}).json()["data"]
    assert data[0]["embedding"] == data[1]["embedding"]


@pytest.mark.parametrize(
    "sent", [[], {}, {"content": "x"}, {"content": [{"type": "unknown"}]}, [{}]]
)
def test_other_inputs_are_refused(embedder: Running, sent: Any) -> None:
    assert post(embedder.url + "/v1/embeddings", {"input": sent}).status_code == 400
