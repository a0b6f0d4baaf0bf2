"""Ollama's dialect as its clients use it: loading, unloading, lists, log-probabilities and
calls."""

from __future__ import annotations

import asyncio
import json
import math
import re
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.embedding import EmbeddingOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.errors import RequestError
from localllm.library.file_kinds import header_facts
from localllm.server.dialects.ollama.requests import keep_alive_s
from localllm.server.models.router import ModelRouter, ServedModel
from localllm.server.models.unloading import KeepAlive, unload_idle
from localllm.server.models.worker import ModelWorker, PlannedModel
from localllm_backends.contract import LoadSpec
from models.tiny_bert import write_bert
from server.test_idle import Host
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"


class WatchedEngine(ScriptedEngine):
    """An engine that records that it was closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was_closed = threading.Event()

    async def close(self) -> None:
        self.was_closed.set()


@pytest.fixture
def engine() -> WatchedEngine:
    return WatchedEngine()


@pytest.fixture
def http(engine: WatchedEngine):
    with (
        running_server([ServedModel("tiny", engine)]) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def smol(smollm2: Path):
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=1024, n_seq_max=2)))
    with (
        running_server({"smollm2": supervisor}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=120) as client,
    ):
        yield client


def loaded(http: httpx.Client) -> list[str]:
    return [m["name"] for m in http.get("/api/ps").json()["models"]]


# --- keep_alive -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(None, None), (0, 0), ("0", 0), ("0s", 0), (30, 30), (0.5, 0.5), ("5m", 300), ("1h30m", 5400), ("300ms", 0.3),
     ("1.5h", 5400), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf)],
)  # fmt: skip
def test_keep_alive_is_read_as_ollama_reads_it(sent: Any, seconds: float | None) -> None:
    assert keep_alive_s(sent) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("sent", ["", "soon", "5 m", "m", "1e3", "٣s"])
def test_another_keep_alive_is_refused(http: httpx.Client, sent: str) -> None:
    with pytest.raises(RequestError):
        keep_alive_s(sent)
    reply = http.post(CHAT, json={"messages": HI, "keep_alive": sent})
    assert reply.status_code == 400
    assert "keep_alive" in reply.json()["error"]


@pytest.mark.parametrize("path", [CHAT, GENERATE])
def test_keep_alive_0_unloads_and_does_not_load(
    http: httpx.Client, engine: WatchedEngine, path: str
) -> None:
    assert http.post(path, json={}).json()["done_reason"] == "load"
    assert loaded(http) == ["tiny"]
    said = http.post(path, json={"keep_alive": 0}).json()
    assert (said["done"], said["done_reason"]) == (True, "unload")
    assert loaded(http) == []
    assert engine.was_closed.is_set()
    loads = engine.loads
    assert http.post(path, json={"keep_alive": "0s"}).json()["done_reason"] == "unload"
    assert engine.loads == loads


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_is_unloaded_after_a_request_with_keep_alive_0(
    http: httpx.Client, engine: WatchedEngine, stream: bool
) -> None:
    reply = http.post(CHAT, json={"messages": HI, "keep_alive": 0, "stream": stream})
    assert "Hello" in reply.text
    assert engine.was_closed.wait(20)


def test_a_model_in_use_is_unloaded_when_its_requests_have_ended(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    gate = Gate()
    engine.script = ["Hel", gate, "lo"]
    with http.stream("POST", CHAT, json={"messages": HI}) as reply:
        lines = reply.iter_lines()
        assert "Hel" in next(lines)
        with httpx.Client(base_url=http.base_url, trust_env=False) as other:
            assert other.post(CHAT, json={"keep_alive": 0}).json()["done_reason"] == "unload"
            assert not engine.was_closed.is_set()
            gate.open()
            assert '"done": true' in list(lines)[-1]
    assert engine.was_closed.wait(20)


def test_a_keep_alive_duration_is_stored_and_shown(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    http.post(CHAT, json={"messages": HI, "stream": False, "keep_alive": "10m"})
    (model,) = http.get("/api/ps").json()["models"]
    left_s = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    assert 500 < left_s <= 600
    http.post(CHAT, json={"messages": HI, "stream": False})  # no keep_alive: the last value
    assert http.get("/api/ps").json()["models"][0]["expires_at"] > model["expires_at"]
    http.post(CHAT, json={"keep_alive": -1})
    assert http.get("/api/ps").json()["models"][0]["expires_at"].startswith("0001-")
    http.post(CHAT, json={"keep_alive": 0.2})
    assert engine.was_closed.wait(20)
    http.post(CHAT, json={"messages": HI, "stream": False})
    assert loaded(http) == ["tiny"], "the next request loads it again, with no time of its own"
    assert http.get("/api/ps").json()["models"][0]["expires_at"].startswith("0001-")


def test_an_endless_keep_alive_outlasts_the_servers_idle_time() -> None:
    async def main() -> None:
        kept, other = Host(), Host()
        models = [ServedModel("kept", kept), ServedModel("other", other)]
        for model in models:
            await model.engine()
        keep_alive = KeepAlive()
        keep_alive.set(models[0].worker, math.inf)
        watch = asyncio.create_task(unload_idle(ModelRouter(models), idle_s=0.05))
        async with asyncio.timeout(30):
            await other.closed.wait()
            assert not kept.closed.is_set()
            keep_alive.set(models[0].worker, 0.01)
            await kept.closed.wait()
        watch.cancel()

    asyncio.run(main())


def test_an_endless_keep_alive_ends_if_memory_is_short_unless_the_owner_forbids_it() -> None:
    async def main() -> None:
        pinned, brief, owned = Host(), Host(), Host()
        workers = [
            ModelWorker("pinned", PlannedModel(pinned)),
            ModelWorker("brief", PlannedModel(brief), idle_s=0.05),
            ModelWorker("owned", PlannedModel(owned), idle_s=0),
        ]
        for worker in workers:
            await worker.engine()
        models = [ServedModel(w.name, worker=w) for w in workers]
        keep_alive = KeepAlive()
        keep_alive.set(workers[0], math.inf)
        keep_alive.set(workers[2], math.inf)
        short = asyncio.Event()
        watch = asyncio.create_task(
            unload_idle(ModelRouter(models), idle_s=3600, pressed=short.is_set, pressed_idle_s=0.01)
        )
        async with asyncio.timeout(30):
            await brief.closed.wait()
            assert not pinned.closed.is_set()
            short.set()
            await pinned.closed.wait()
            # By now the owned model would have been unloaded too.
            await workers[1].engine()
            await brief.closed.wait()
            assert not owned.closed.is_set()
        watch.cancel()

    asyncio.run(main())


# --- lists ----------------------------------------------------------------------------------------


def test_every_get_answers_head(http: httpx.Client) -> None:
    for path in ("/", "/api/tags", "/api/version", "/api/ps", "/v1/models", "/health", "/props"):
        got, head = http.get(path), http.head(path)
        assert (head.status_code, head.content) == (200, b""), path
        assert head.headers["content-type"] == got.headers["content-type"]
        assert head.headers["content-length"] == str(len(got.content)), path
    assert http.head("/models/sse").status_code == 200  # the reply to HEAD ends
    assert http.head("/nowhere").status_code == 404
    assert http.head(CHAT).status_code == 405


def test_every_model_has_a_digest_of_64_digits(http: httpx.Client) -> None:
    (model,) = http.get("/api/tags").json()["models"]
    assert re.fullmatch("[0-9a-f]{64}", model["digest"])
    http.post(CHAT, json={})
    assert http.get("/api/tags").json()["models"][0]["digest"] == model["digest"]
    assert http.get("/api/ps").json()["models"][0]["digest"] == model["digest"]


def test_show_lists_the_defaults_of_a_request(http: httpx.Client) -> None:
    http.post(CHAT, json={})
    said = http.post("/api/show", json={"model": "tiny"}).json()
    parameters = dict(line.split() for line in said["parameters"].splitlines())
    assert parameters["temperature"] == "0.8"
    assert parameters["num_ctx"] == "4096"
    assert said["modelfile"].startswith("FROM tiny\n")
    assert said["model_info"]["scripted.context_length"] == 4096
    assert said["capabilities"][:2] == ["completion", "tools"]


def test_curl_needs_no_content_type_header(smol: httpx.Client) -> None:
    body = json.dumps(
        {"model": "smollm2", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    ).encode()
    head = (
        f"POST {GENERATE} HTTP/1.1\r\nHost: {smol.base_url.netloc.decode()}\r\nUser-Agent: "
        "curl/8.5.0\r\nAccept: */*\r\n"
        f"Content-Length: {len(body)}\r\nContent-Type: "
        "application/x-www-form-urlencoded\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", smol.base_url.port or 0)) as wire:
        wire.sendall(head.encode() + body)
        said = b"".join(iter(lambda: wire.recv(65536), b""))
    assert said.startswith(b"HTTP/1.1 200")
    assert b'"done":true' in said.replace(b" ", b"")


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "ask"), [(CHAT, {"messages": HI}), (GENERATE, {"prompt": "Say hi."})]
)
def test_logprobs(smol: httpx.Client, path: str, ask: dict[str, Any]) -> None:
    body = {
        **ask,
        "options": {"num_predict": 4, "temperature": 0},
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = smol.post(path, json={**body, "stream": False}).json()["logprobs"]
    assert len(whole) == 4
    for entry in whole:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy: the most likely
    lines = [json.loads(line) for line in smol.post(path, json=body).text.splitlines()]
    assert [e["token"] for line in lines for e in line.get("logprobs", ())] == [
        e["token"] for e in whole
    ]
    plain = smol.post(path, json={**ask, "stream": False, "options": {"num_predict": 4}}).json()
    assert "logprobs" not in plain
    bare = smol.post(path, json={**body, "top_logprobs": 0, "stream": False}).json()["logprobs"]
    assert set(bare[0]) == {"token", "logprob", "bytes"}


def test_calls_have_ids_that_their_results_come_back_by(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    calls = [
        f'<tool_call>\n{{"name": "f", "arguments": {{"n": {n}}}}}\n</tool_call>\n' for n in (1, 2)
    ]
    engine.script = calls
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    whole = http.post(CHAT, json={"messages": HI, "tools": tools, "stream": False}).json()[
        "message"
    ]["tool_calls"]
    lines = [
        json.loads(line)
        for line in http.post(CHAT, json={"messages": HI, "tools": tools}).text.splitlines()
    ]
    streamed = [c for line in lines for c in line["message"].get("tool_calls", ())]
    for found in (whole, streamed):
        assert [c["function"] for c in found] == [
            {"index": i, "name": "f", "arguments": {"n": i + 1}} for i in range(2)
        ]
        assert len({c["id"] for c in found}) == 2
    engine.script = ("done",)
    results = [{"role": "tool", "tool_call_id": c["id"], "tool_name": "f",
        "content": f"r{i}"} for i, c in enumerate(whole)]  # fmt: skip
    said = http.post(
        CHAT,
        json={
            "messages": [*HI, {"role": "assistant", "content": "", "tool_calls": whole}, *results],
            "tools": tools,
        },
    )
    assert said.status_code == 200
    prompt = engine.requests[-1].prompt
    assert prompt.index("r0") < prompt.index("r1")


def test_samplers_of_the_other_dialects_are_options_too(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    sent = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3,
        "dry_penalty_last_n": 9, "min_p": 0.2,
            "xtc_probability": 0.5, "xtc_threshold": 0.2}  # fmt: skip
    options = {**sent, "dry_sequence_breakers": ["x", ""], "min_tokens": 2, "stop_token_ids": [7],
               "repetition_detection": {"max_pattern_size": 5}}  # fmt: skip
    reply = http.post(CHAT, json={"messages": HI, "stream": False, "options": options})
    assert "x-localllm-ignored" not in reply.headers
    made = engine.requests[-1].generation
    assert {name: getattr(made.sampling, name) for name in sent} == sent
    assert made.sampling.dry_sequence_breakers == ("x",)
    assert (made.min_tokens, made.stop_token_ids) == (2, (7,))
    assert made.loops is not None
    low = http.post(CHAT, json={"messages": HI, "options": {"min_tokens": 9, "num_predict": 2}})
    assert (low.status_code, "min_tokens" in low.json()["error"]) == (400, True)


def test_truncate_leaves_out_the_oldest_messages_with_a_header(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    long = [
        {"role": r, "content": f"{i} " + "word " * 40}
        for i in range(14)
        for r in ("user", "assistant")
    ] + HI
    assert http.post(CHAT, json={"messages": long, "stream": False}).status_code == 400
    assert (
        http.post(CHAT, json={"messages": long, "stream": False, "truncate": False}).status_code
        == 400
    )
    cut = http.post(CHAT, json={"messages": long, "stream": False, "truncate": True})
    assert cut.status_code == 200
    assert re.match(r"\d+ messages, \d+ tokens", cut.headers["x-localllm-compacted"])
    assert "earlier messages were omitted" in engine.requests[-1].prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_refused_with_the_text_that_clients_compact_on(
    smol: httpx.Client, stream: bool
) -> None:
    reply = smol.post(
        CHAT, json={"messages": [{"role": "user", "content": "word " * 1500}], "stream": stream}
    )
    assert reply.status_code == 400
    # The pattern that pi and opencode use.
    assert re.search(
        r"prompt too long; exceeded (?:max )?context length by \d+ tokens", reply.json()["error"]
    )


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (CHAT, {"messages": HI, "shift": True}, "shift"),
        (CHAT, {"messages": HI, "shift": False}, ""),
        (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
        (GENERATE, {"prompt": "a", "raw": True, "truncate": True}, "truncate"),
        (GENERATE, {"prompt": "a", "truncate": True}, ""),
        (CHAT, {"messages": HI, "think": "max"}, "think"),
        (CHAT, {"messages": HI, "think": "low"}, "think"),
    ],
    ids=str,
)
def test_fields_without_effect_are_named(
    http: httpx.Client, path: str, body: dict[str, Any], named: str
) -> None:
    reply = http.post(path, json={**body, "stream": False})
    assert reply.status_code == 200, reply.text
    assert reply.headers.get("x-localllm-ignored", "") == named


@pytest.mark.parametrize(("think", "effort"), [("max", "high"), ("low", "low"), (True, "medium")])
def test_a_level_of_thinking_reaches_the_template_as_one_it_knows(think: Any, effort: str) -> None:
    template = (
        "{{ reasoning_effort }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    engine = ScriptedEngine(chat_template=template)
    with running_server({"tiny": engine}) as running:
        httpx.post(
            running.url + CHAT, json={"messages": HI, "think": think}, trust_env=False
        ).raise_for_status()
    assert engine.requests[-1].prompt.startswith(f"{effort}[")


@pytest.mark.parametrize("think", [True, False])
def test_think_sets_the_templates_thinking_variable(think: bool) -> None:
    template = (
        "{{ enable_thinking }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    engine = ScriptedEngine(chat_template=template)
    with running_server({"tiny": engine}) as running:
        httpx.post(
            running.url + CHAT, json={"messages": HI, "think": think}, trust_env=False
        ).raise_for_status()
    assert engine.requests[-1].prompt.startswith(f"{think}[")


def test_an_image_in_the_history_does_not_end_the_chat(
    http: httpx.Client, engine: WatchedEngine
) -> None:
    asked = {"role": "user", "content": "What is this?", "images": ["aGk="]}
    assert http.post(CHAT, json={"messages": [asked]}).status_code == 400
    later = [asked, {"role": "assistant", "content": "?"}, *HI]
    reply = http.post(CHAT, json={"messages": later, "stream": False})
    assert reply.headers["x-localllm-ignored"] == "messages.images"
    assert "[image omitted" in engine.requests[-1].prompt


def test_an_unloaded_model_is_shown_from_its_header(tiny_model: Path) -> None:
    model = ServedModel("m", ScriptedEngine(), details={"header": lambda: header_facts(tiny_model)})
    with running_server([model]) as server:
        said = httpx.post(server.url + "/api/show", json={"model": "m"}).json()
        nothing = httpx.post(server.url + "/api/show", json={})
    assert said["model_info"]["general.architecture"] == said["details"]["family"] == "llama"
    assert said["model_info"]["general.parameter_count"] > 0
    assert said["model_info"]["llama.embedding_length"] > 0
    assert nothing.status_code == 400


def test_an_empty_input_gives_no_embeddings(tmp_path: Path) -> None:
    model = ServedModel(
        "v", Supervisor(EmbeddingOptions(str(write_bert(tmp_path / "vectors.gguf")))), embeds=True
    )
    sent: list[tuple[str, Any]] = [("input", ""), ("input", []), ("prompt", "")]
    with running_server([model]) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for name, nothing in sent:
            path, key = (
                ("/api/embed", "embeddings")
                if name == "input"
                else ("/api/embeddings", "embedding")
            )
            answer = http.post(path, json={"model": "v", name: nothing})
            assert (answer.status_code, answer.json()[key]) == (200, []), answer.text


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_stream_that_waits_is_not_silent_and_its_lines_stay_json(path: str) -> None:
    gate = Gate()
    body = {"model": "tiny", "prompt": "hi"}
    if path == "/api/chat":
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}  # type: ignore[dict-item]
    settings = {"keepalive_s": 0.05, "grace_s": 0.01}
    said = ""
    with (
        running_server({"tiny": ScriptedEngine(("Hello", gate, "!"))}, **settings) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
        client.stream("POST", path, json=body) as reply,
    ):
        for piece in reply.iter_text():
            said += piece
            if said.endswith(" "):  # sent while the engine waits
                gate.open()
    lines = [json.loads(line) for line in said.splitlines()]
    assert " {" in said
    assert lines[-1]["done"] is True
    texts = [line.get("response") or line.get("message", {}).get("content") for line in lines]
    assert "".join(filter(None, texts)) == "Hello!"
