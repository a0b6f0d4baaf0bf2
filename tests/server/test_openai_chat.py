"""OpenAI's chat API, called by the real `openai` package over a real socket."""

from __future__ import annotations

import json
import socket

import httpx
import openai
import pytest

from localllm.engine.messages import Failure
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine, Step


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(engine: ScriptedEngine):
    with running_server({"tiny": engine}, keepalive_s=0.2, grace_s=0.2) as running:
        yield running


@pytest.fixture
def client(server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


@pytest.fixture
def http(server: Running):
    with httpx.Client(base_url=server.url, trust_env=False) as c:
        yield c


HI = [{"role": "user", "content": "hi"}]


def test_models_are_listed_by_name_with_their_context(client: openai.OpenAI) -> None:
    client.chat.completions.create(model="tiny", messages=HI)
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.meta["n_ctx"] == 4096
    assert client.models.retrieve("tiny").id == "tiny"


def test_a_complete_answer_has_its_text_and_usage(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI)
    assert reply.choices[0].message.content == "Hello world!"
    assert reply.choices[0].finish_reason == "stop"
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0].prompt == prompt
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 12)
    assert reply.usage.total_tokens == len(prompt) + 12


def test_a_streamed_answer_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_without_include_usage_no_chunk_has_empty_choices(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, stream=True))
    assert all(c.choices for c in chunks)


def test_limits_and_sampling_reach_the_engine(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    reply = client.chat.completions.create(
        model="tiny", messages=HI, max_tokens=5, temperature=0.25, seed=7, top_p=0.5,
        logit_bias={"65": -100},
        presence_penalty=0.5, frequency_penalty=-0.5,
        extra_body={"top_k": 3, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.1,
        "ignore_eos": True,
                    "cache_prompt": False},
    )  # fmt: skip
    assert reply.choices[0].message.content == "Hello"
    assert reply.choices[0].finish_reason == "length"
    sent = engine.requests[0]
    s = sent.generation.sampling
    assert (s.temperature, s.seed, s.top_p, s.top_k, s.min_p) == (0.25, 7, 0.5, 3, 0.1)
    assert (s.typical_p, s.repeat_penalty, s.presence_penalty, s.frequency_penalty) == (
        0.9,
        1.1,
        0.5,
        -0.5,
    )
    assert s.logit_bias == {65: -100.0}
    assert (
        sent.generation.ignore_eos,
        sent.generation.cache_prompt,
        sent.generation.max_tokens,
    ) == (True, False, 5)


def test_max_completion_tokens_wins_over_max_tokens(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, max_completion_tokens=3, max_tokens=9)
    assert engine.requests[0].generation.max_tokens == 3


def test_a_stop_string_ends_the_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, stop=[" wor", "zzz"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("Hello", "stop")


def test_a_prompt_longer_than_the_window_is_a_400_also_for_a_stream(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "x" * 5000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=long, stream=stream)
        assert caught.value.code == "context_length_exceeded"
        assert "4096" in caught.value.message


def test_n_choices_are_returned_with_and_without_streaming(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    engine.script = lambda r: ["a" * (r.generation.sampling.seed or 0)]
    reply = client.chat.completions.create(model="tiny", messages=HI, n=3, seed=2)
    assert [c.message.content for c in reply.choices] == ["aa", "aaa", "aaaa"]
    assert reply.usage.completion_tokens == 9
    texts = {0: "", 1: "", 2: ""}
    for chunk in client.chat.completions.create(
        model="tiny", messages=HI, n=3, seed=2, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(texts.values()) == ["aa", "aaa", "aaaa"]


def test_logprobs_are_returned_with_and_without_streaming(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert "".join(p.token for p in content) == "Hello world!"
    assert [len(p.top_logprobs) for p in content] == [2] * 12
    chunks = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, stream=True)
    seen = [
        p.token
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for p in c.choices[0].logprobs.content
    ]
    assert "".join(seen) == "Hello world!"


def test_unusual_messages_of_editors_are_accepted(
    client: openai.OpenAI, engine: ScriptedEngine
) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
            "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]  # fmt: skip
    client.chat.completions.create(model="tiny", messages=messages)
    prompt = engine.requests[0].prompt
    assert prompt.startswith(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
    )
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in prompt


def test_a_worker_that_dies_in_mid_answer_is_an_error_event_and_the_next_request_works(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["Hel", Failure("", "worker_died", "the engine's process ended", "again")]
    with http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as r:
        assert r.status_code == 200
        lines = [line for line in r.iter_lines() if line.startswith("data: ")]
    assert json.loads(lines[-2][6:])["error"]["code"] == "worker_died"
    assert lines[-1] == "data: [DONE]"
    engine.script = ["fine"]
    again = http.post("/v1/chat/completions", json={"messages": HI})
    assert again.json()["choices"][0]["message"]["content"] == "fine"


def test_a_failure_before_the_first_token_is_a_status(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.load_error = None
    engine.script = [Failure("", "worker_died", "gone")]
    r = http.post("/v1/chat/completions", json={"messages": HI})
    assert r.status_code == 503
    assert r.headers["retry-after"]
    assert r.json()["error"]["code"] == "worker_died"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_token_is_retried_once_on_a_new_worker(
    http: httpx.Client, engine: ScriptedEngine, stream: bool
) -> None:
    engine.load_error = None
    tries: list[Step] = [Failure("", "worker_died", "gone"), "fine"]
    engine.script = lambda request: [tries.pop(0)]
    r = http.post("/v1/chat/completions", json={"messages": HI, "stream": stream})
    assert r.status_code == 200
    assert "fine" in r.text
    assert "worker_died" not in r.text
    assert tries == []


def test_a_failed_request_is_not_tried_a_third_time(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    tried = len(engine.requests)
    engine.script = [Failure("", "worker_died", "gone")]
    assert http.post("/v1/chat/completions", json={"messages": HI}).status_code == 503
    assert len(engine.requests) == tried + 2


def test_headers_and_comments_come_while_the_model_loads(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.load_gate = Gate()
    with http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as r:
        lines = r.iter_lines()
        # The comment is a line of the next event: older decoders read a separate one as an empty
        # event.
        assert next(lines) == ": loading"
        assert next(lines) == ": loading"  # another comment after more waiting
        engine.load_gate.open()
        rest = list(lines)
    assert "data: [DONE]" in rest


def test_prefill_progress_is_in_the_comments(http: httpx.Client, engine: ScriptedEngine) -> None:
    gate = Gate()
    engine.script = [gate, "done"]
    with http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as r:
        lines = r.iter_lines()
        comment = next(line for line in lines if line.startswith(": prefill"))
        n = len(engine.requests[0].prompt)
        assert comment == f": prefill {n}/{n} tokens, 0 cached"
        gate.open()
        assert list(lines)[-2] == "data: [DONE]"


def test_a_client_that_leaves_cancels_its_request(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    engine.script = ["a", Gate()]
    with http.stream("POST", "/v1/chat/completions", json={"messages": HI, "stream": True}) as r:
        next(line for line in r.iter_lines() if '"content":"a"' in line)
    # A complete reply sends no data before its end. Its client leaves when the engine is known to
    # work on it.
    gate = Gate()
    engine.script = ["a", gate]
    whole = json.dumps({"messages": HI}).encode()
    with socket.create_connection(
        (http.base_url.host, http.base_url.port or 80), timeout=30
    ) as leaving:
        leaving.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
            b"application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(whole), whole)
        )
        assert gate.reached.wait(30)
    # When a later request on the same loop is answered, both cancellations have been carried out.
    engine.script = ["b"]
    for _ in range(50):
        http.post("/v1/chat/completions", json={"messages": HI})
        if len(engine.cancelled) == 2:
            break
    assert len(engine.cancelled) == 2
    assert engine.running == 0


def test_unknown_fields_are_tolerated_and_named(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"messages": HI, "stream": stream, "frobnicate": 1, "user": "me", "zzz": None}
        r = http.post("/v1/chat/completions", json=body)
        assert r.status_code == 200
        assert r.headers["x-localllm-ignored"] == "frobnicate,zzz"


def test_cache_use_is_reported(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.cached_tokens, engine.cache_miss = 5, "the system prompt changed"
    r = http.post("/v1/chat/completions", json={"messages": HI})
    assert r.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert r.headers["x-localllm-cache"] == (
        f"5/{len(engine.requests[0].prompt)} tokens; the system prompt changed"
    )
    r = http.post("/v1/chat/completions", json={"messages": HI, "stream": True})
    assert ": cache 5/" in r.text


def test_an_unknown_model_is_a_404_that_names_what_is_served(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=HI)
    assert caught.value.code == "model_not_found"
    assert "tiny" in caught.value.message


def test_reasoning_is_split_out(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.info = engine.info.__class__(
        **{
            **{f: getattr(engine.info, f) for f in engine.info.__slots__},
            "chat_template": "{{ messages[-1].content }}<think>\n{# </think> #}",
        }
    )
    engine.script = ["let me ", "think</th", "ink>\n\nAns", "wer"]
    r = http.post("/v1/chat/completions", json={"messages": HI}).json()
    message = r["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("let me think", "Answer")


def test_metrics_and_health(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert 'localllm_model_loaded{model="tiny"} 0' in http.get("/metrics").text
    http.post("/v1/chat/completions", json={"messages": HI})
    text = http.get("/metrics").text
    assert 'localllm_requests_total{model="tiny"} 1' in text
    assert 'localllm_decode_tok_s{model="tiny"} 12.5' in text
    assert 'localllm_generated_tokens_total{model="tiny"} 1234567' in text
