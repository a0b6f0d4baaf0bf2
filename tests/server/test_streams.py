"""Streams of the other dialects.

The tests cover the order of events, their ends and their errors. A stream's text equals the
complete reply.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Failure, Reasoning
from localllm.server.models.router import ServedModel
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
THINKING = "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>" \
    "{% endif %}{{ m.content }}{% endfor %}[assistant]<think>\n"  # fmt: skip
CALL = [
    "Let me",
    " see.\n<tool_",
    'call>\n{"name": "look", "arguments": {"q"',
    ': "x"}}',
    "\n</tool_call>",
]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def thinker() -> ScriptedEngine:
    return ScriptedEngine(chat_template=THINKING)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine, thinker: ScriptedEngine):
    models = [ServedModel("tiny", engine), ServedModel("thinker", thinker)]
    with (
        running_server(models, grace_s=0.2, keepalive_s=0.2) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the (event, data) pairs of a stream, with parsed data."""
    found: list[tuple[str, Any]] = []
    with http.stream("POST", path, json={**body, "stream": True}) as r:
        assert r.status_code == 200, r.read()
        name = ""
        for line in r.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                found.append((name, line[6:] if line == "data: [DONE]" else json.loads(line[6:])))
    return found


def lines(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    r = http.post(path, json=body)
    assert r.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in r.text.splitlines()]


def test_chat_tool_calls_stream_in_openais_shape(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = CALL
    chunks = [
        d for _, d in events(http, "/v1/chat/completions", {"messages": HI, "tools": [TOOL]})
    ][:-1]
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content") or "" for d in deltas) == "Let me see."
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert calls[0]["id"].startswith("call_")
    assert calls[0]["function"] == {"name": "look", "arguments": ""}
    assert all("id" not in c and c["index"] == 0 for c in calls[1:])
    assert len(calls) >= 3
    assert "".join(c["function"]["arguments"] for c in calls) == '{"q": "x"}'
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_responses_events_build_the_whole_response(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = CALL
    body = {"input": "hi", "tools": [{"type": "function", "name": "look"}]}
    seen = events(http, "/v1/responses", body)
    assert all(name == data["type"] for name, data in seen)
    assert [d["sequence_number"] for _, d in seen] == list(range(len(seen)))
    names = [n for n, _ in seen]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    text = "".join(d["delta"] for n, d in seen if n == "response.output_text.delta")
    arguments = "".join(
        d["delta"] for n, d in seen if n == "response.function_call_arguments.delta"
    )
    final = seen[-1][1]["response"]
    message, call = final["output"]
    assert message["content"][0]["text"] == text == "Let me see."
    assert (call["name"], call["arguments"]) == ("look", arguments) == ("look", '{"q": "x"}')
    assert final["usage"]["output_tokens"] == len("".join(CALL))
    whole = http.post("/v1/responses", json=body).json()
    assert [o["type"] for o in whole["output"]] == ["message", "function_call"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_previous_response_is_continued(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = ["first answer"]
    if stream:
        first = events(http, "/v1/responses", {"input": "one"})[-1][1]["response"]
    else:
        first = http.post("/v1/responses", json={"input": "one"}).json()
    http.post("/v1/responses", json={"input": "two", "previous_response_id": first["id"]})
    prompt = engine.requests[-1].prompt
    assert "user\none" in prompt
    assert "assistant\nfirst answer" in prompt
    assert "user\ntwo" in prompt
    assert http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
    assert http.delete(f"/v1/responses/{first['id']}").json()["deleted"]
    assert http.get(f"/v1/responses/{first['id']}").status_code == 404
    unkept = http.post("/v1/responses", json={"input": "one", "store": False}).json()
    assert http.get(f"/v1/responses/{unkept['id']}").status_code == 404


def test_a_response_that_fails_says_so_in_its_last_event(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["x", Failure("", "worker_died", "gone")]
    name, data = events(http, "/v1/responses", {"input": "hi"})[-1]
    assert name == "response.failed"
    assert data["response"]["error"] == {"code": "worker_died", "message": "gone"}


def test_anthropic_events_in_order(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.script = CALL
    body = {
        "messages": HI,
        "max_tokens": 500,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    }
    # Pings may come at any time on a busy machine.
    seen = [event for event in events(http, "/v1/messages", body) if event[0] != "ping"]
    assert [n for n, _ in seen if n != "content_block_delta"] == [
        "message_start", "content_block_start", "content_block_stop", "content_block_start",
        "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = seen[0][1]["message"]
    assert start["usage"]["input_tokens"] == len(engine.requests[0].prompt)
    deltas = [d["delta"] for n, d in seen if n == "content_block_delta"]
    assert "".join(d.get("text", "") for d in deltas) == "Let me see."
    assert json.loads("".join(d.get("partial_json", "") for d in deltas)) == {"q": "x"}
    assert seen[-2][1]["delta"]["stop_reason"] == "tool_use"


def test_anthropic_pings_while_waiting_and_errors_in_its_shape(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    gate = Gate()
    engine.script = [gate, Failure("", "worker_died", "gone")]
    with http.stream(
        "POST", "/v1/messages", json={"messages": HI, "max_tokens": 5, "stream": True}
    ) as r:
        seen = r.iter_lines()
        assert next(line for line in seen if line.startswith("event")) == "event: ping"
        gate.open()
        rest = list(seen)
    assert json.loads(rest[-2][6:]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "gone"},
    }
    engine.script = ["fine"]
    r = http.post(
        "/v1/messages", json={"messages": [{"role": "wizard", "content": "x"}], "max_tokens": 1}
    )
    assert (r.status_code, r.json()["error"]["type"]) == (400, "invalid_request_error")


def test_ollamas_stream_has_text_and_calls_in_its_lines(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = CALL
    seen = lines(http, "/api/chat", {"messages": HI, "tools": [TOOL]})
    assert "".join(line["message"]["content"] for line in seen) == "Let me see."
    assert [c["function"] for line in seen for c in line["message"].get("tool_calls", [])] == [
        {"index": 0, "name": "look", "arguments": {"q": "x"}}
    ]
    assert [line["done"] for line in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1]["done_reason"] == "stop"
    engine.script = ["ab", "cd"]
    assert [line["response"] for line in lines(http, "/api/generate", {"prompt": "x"})] == [
        "ab",
        "cd",
        "",
    ]


def test_ollama_errors_are_its_own(http: httpx.Client, engine: ScriptedEngine) -> None:
    assert (
        http.post("/api/chat", json={"model": "gone", "messages": HI})
        .json()["error"]
        .startswith("this server has no model 'gone'")
    )
    engine.script = ["x", Failure("", "worker_died", "gone")]
    assert lines(http, "/api/chat", {"messages": HI})[-1] == {"error": "gone"}


def test_llama_cpps_completion_stream_has_its_fields(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["ab", "cd"]
    seen = [d for _, d in events(http, "/completion", {"prompt": "x"})]
    assert [d["content"] for d in seen] == ["ab", "cd", ""]
    assert [d["stop"] for d in seen] == [False, False, True]
    assert seen[-1]["timings"]["predicted_n"] == 4


def test_a_completions_stream_has_its_choices_and_usage(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["ab", "cd"]
    body = {"prompt": ["x", "y"], "echo": True, "stream_options": {"include_usage": True}}
    seen = [d for _, d in events(http, "/v1/completions", body)]
    texts = {0: "", 1: ""}
    for chunk in seen[:-2]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "xabcd", 1: "yabcd"}
    assert seen[-2]["usage"]["completion_tokens"] == 8
    assert seen[-1] == "[DONE]"


REASONED = ["Hm, ", "two.", "</think>\n\n", "It is", " 2."]


@pytest.mark.parametrize(
    ("path", "body", "find"),
    [
        (
            "/v1/chat/completions",
            {"messages": HI},
            lambda j: (
                j["choices"][0]["message"]["reasoning_content"],
                j["choices"][0]["message"]["content"],
            ),
        ),
        (
            "/v1/responses",
            {"input": "hi"},
            lambda j: tuple(o["content"][0]["text"] for o in j["output"]),
        ),
        (
            "/v1/messages",
            {"messages": HI, "max_tokens": 99},
            lambda j: (j["content"][0]["thinking"], j["content"][1]["text"]),
        ),
        (
            "/api/chat",
            {"messages": HI, "stream": False},
            lambda j: (j["message"]["thinking"], j["message"]["content"]),
        ),
    ],
)
def test_reasoning_is_separate_in_every_dialect(
    http: httpx.Client, thinker: ScriptedEngine, path, body, find
) -> None:
    thinker.script = REASONED
    assert find(http.post(path, json={**body, "model": "thinker"}).json()) == (
        "Hm, two.",
        "It is 2.",
    )


def test_reasoning_that_a_client_drops_is_put_back(
    http: httpx.Client, thinker: ScriptedEngine
) -> None:
    thinker.script = REASONED
    question = [{"role": "user", "content": "1 + 1 in dropped words?"}]
    http.post(
        "/v1/chat/completions", json={"model": "thinker", "messages": question, "stream": True}
    )
    first = thinker.requests[-1].prompt
    turn = [
        *question,
        {"role": "assistant", "content": "It is 2."},
        {"role": "user", "content": "sure?"},
    ]
    http.post("/v1/chat/completions", json={"model": "thinker", "messages": turn})
    assert thinker.requests[-1].prompt.startswith(
        first.removesuffix("\n") + "Hm, two.</think>It is 2."
    )


def test_a_schema_waits_until_the_reasoning_is_over(
    http: httpx.Client, thinker: ScriptedEngine
) -> None:
    thinker.script = ["Hm, ", "one.", "</think>", '{"a": 1}']
    thinker.requests.clear()
    body = {"model": "thinker", "messages": HI, "response_format": {"type": "json_object"}}
    reply = http.post("/v1/chat/completions", json=body).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, one.", '{"a": 1}')
    (request,) = thinker.requests
    assert request.constraint is not None
    assert request.constraint.reasoning == Reasoning("<think>", "</think>", opened=True)
    assert request.constraint.lead == "\n\n"
    assert reply["usage"]["prompt_tokens"] == len(request.prompt)
    assert reply["usage"]["completion_tokens"] == len('Hm, one.</think>\n\n{"a": 1}')


def test_a_forced_call_comes_after_the_reasoning(
    http: httpx.Client, thinker: ScriptedEngine
) -> None:
    thinker.script = ["Hm.", "</think>", '{"q": ', '"x"}']
    body = {"model": "thinker", "messages": HI, "tools": [TOOL], "tool_choice": "required"}
    message = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "x"}'}
    assert message["content"] is None


def test_an_answer_with_reasoning_and_calls_is_one_request(
    http: httpx.Client, thinker: ScriptedEngine
) -> None:
    calls = [f'<tool_call>{{"name": "look", "arguments": {{"q": {n}}}}}' for n in (1, 2)]
    thinker.script = ["I could <tool_call>", "</think>", "Let me see. ", *calls, "Done."]
    thinker.requests.clear()
    body = {"model": "thinker", "messages": HI, "tools": [TOOL]}
    reply = http.post("/v1/chat/completions", json=body).json()
    message = reply["choices"][0]["message"]
    assert message["reasoning_content"] == "I could <tool_call>"
    assert message["content"] == "Let me see.Done."
    made = [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
    assert made == [{"q": 1}, {"q": 2}]
    (request,) = thinker.requests
    assert request.constraint is not None
    assert list(request.constraint.triggers) == ["<tool_call>"]


def test_every_dialect_reports_the_same_context(http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 1})
    numbers = {
        http.get("/v1/models").json()["data"][0]["meta"]["n_ctx"],
        http.get("/v1/models").json()["models"][0]["context_window"],
        http.get("/props").json()["default_generation_settings"]["n_ctx"],
        http.post("/api/show", json={"model": "tiny"}).json()["model_info"][
            "scripted.context_length"
        ],
        next(m for m in http.get("/api/ps").json()["models"] if m["name"] == "tiny")[
            "context_length"
        ],
    }
    assert numbers == {4096}


def test_the_requests_that_editors_probe_with_are_answered(http: httpx.Client) -> None:
    assert http.get("/").text == "Ollama is running"
    assert http.head("/").status_code == 200
    assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    assert [m["model"] for m in http.get("/api/tags").json()["models"]] == ["tiny", "thinker"]
    assert "tools" in http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
    assert http.get("/props", params={"model": "tiny", "autoload": "false"}).json()[
        "chat_template_caps"
    ]["supports_tools"]
    assert http.get("/v1/models/").status_code == 200
    assert http.post("/v1/completions/", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_routes_that_describe_a_model_do_not_load_it() -> None:
    engine = ScriptedEngine()
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        for path in ("/v1/models", "/v1/models/tiny", "/props", "/api/tags", "/api/ps", "/metrics"):
            assert client.get(path).status_code == 200
        assert client.post("/api/show", json={"model": "tiny"}).status_code == 200
        assert engine.loads == 0
