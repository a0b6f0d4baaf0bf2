"""Log-probabilities belong to the answer's tokens only.

They do not depend on the text before, between and after.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    "{% if enable_thinking %}<think>\n{% else %}{# </think> #}{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools, none called": ("Well, <b>no</b> call.", {"tools": [TOOL]}),
    "text and a call": ("Let me see.\n" + CALL, {"tools": [TOOL]}),
    "reasoning": (
        "The answer, so far.</think>\n\nThe answer is 4.",
        {"chat_template_kwargs": {"enable_thinking": True}},
    ),
    "reasoning that opens itself": ("<think>\nAn A.\n</think>\n\nA B.", {}),
    "reasoning, text and a call": (
        "Hm. Let.</think>\nLet me  see.\n" + CALL,
        {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}},
    ),
}


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[ScriptedEngine, httpx.Client]]:
    engine = ScriptedEngine(chat_template=TEMPLATE)
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield engine, client


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_the_tokens_of_logprobs_spell_the_answer(
    scripted: tuple[ScriptedEngine, httpx.Client], name: str, size: int
) -> None:
    engine, http = scripted
    script, more = CASES[name]
    engine.script = [script[i : i + size] for i in range(0, len(script), size)]
    body = {"messages": HI, "logprobs": True, "top_logprobs": 2, **more}
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    stream = http.post("/v1/chat/completions", json={**body, "stream": True}).text
    said = choice["message"]["content"]
    entries = choice["logprobs"]["content"]
    assert "".join(e["token"] for e in entries) == said
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    chunks = [
        json.loads(line[6:])["choices"]
        for line in stream.splitlines()
        if line.startswith("data: {")
    ]
    streamed = [c["logprobs"]["content"] for choices in chunks for c in choices if c["logprobs"]]
    assert [e for part in streamed for e in part] == entries


def test_responses_have_logprobs_on_request() -> None:
    with (
        running_server({"m": ScriptedEngine(["Hel", "lo."])}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        asked = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
        part = http.post("/v1/responses", json=asked).json()["output"][0]["content"][0]
        assert "".join(e["token"] for e in part["logprobs"]) == part["text"] == "Hello."
        assert len(part["logprobs"][0]["top_logprobs"]) == 1
        stream = http.post("/v1/responses", json={**asked, "stream": True}).text
        deltas = [
            json.loads(line[6:])
            for line in stream.splitlines()
            if '"response.output_text.delta"' in line
        ]
        said = [e for d in deltas if "delta" in d for e in d["logprobs"]]
        assert said == part["logprobs"]
        plain = http.post("/v1/responses", json={"input": "hi"}).json()["output"][0]["content"][0]
        assert plain["logprobs"] == []


@pytest.mark.parametrize("n", [1, 2])
def test_text_offsets_continue_from_chunk_to_chunk(n: int) -> None:
    with (
        running_server({"m": ScriptedEngine(["ab", "cde", "f"])}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        body = {"prompt": "x", "logprobs": 0, "n": n}
        whole = [
            c["logprobs"]["text_offset"]
            for c in http.post("/v1/completions", json=body).json()["choices"]
        ]
        stream = http.post("/v1/completions", json={**body, "stream": True}).text
    assert whole == [[0, 1, 2, 3, 4, 5]] * n
    found: list[list[int]] = [[] for _ in range(n)]
    for line in stream.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else []:
            found[choice["index"]] += (choice["logprobs"] or {}).get("text_offset", [])
    assert found == whole


def test_a_fill_in_stream_ends_with_a_choice_and_its_usage() -> None:
    engine = ScriptedEngine(["x"], fim_tokens={"pre": 200, "suf": 201, "mid": 202})
    with running_server({"m": engine}) as server:
        body = {"prompt": "a", "suffix": "b", "stream": True, "n": 2}
        text = httpx.post(server.url + "/v1/fim/completions", json=body, trust_env=False).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert all(chunk["choices"] for chunk in chunks)
    assert [
        c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]
    ] == ["stop", "stop"]
    assert ["usage" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    assert text.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def http(few_layers: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=1024, n_seq_max=1)))
    with (
        running_server({"few-layers": host}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def test_a_real_models_tokens_spell_its_answer(http: httpx.Client) -> None:
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
    }
    asked = [{"role": "user", "content": "Repeat after me: Zürich, naïve, 😀, 東京."}]
    body = {
        "messages": asked,
        "tools": [tool],
        "temperature": 0,
        "max_tokens": 40,
        "logprobs": True,
    }
    choice = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    said, entries = choice["message"]["content"], choice["logprobs"]["content"]
    assert len(entries) > len(said) / 10
    spelled = "".join(e["token"] for e in entries if "\ufffd" not in e["token"])
    left = iter(said)
    assert all(char in left for char in spelled), (said, spelled)
    assert len(spelled) > 0.7 * len(said)


_PROMPT = "😊 日本 naïve 👩\u200d👩 x"


@pytest.mark.parametrize("seed", range(4))
def test_bytes_are_the_tokens_own_and_offsets_point_into_the_text(
    http: httpx.Client, seed: int
) -> None:
    # At a high temperature, without an end of turn, the model writes parts of characters, control
    # tokens and odd bytes.
    body = {
        "prompt": _PROMPT,
        "temperature": 4.0,
        "seed": seed,
        "max_tokens": 40,
        "logprobs": 5,
        "ignore_eos": True,
    }
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    told, text = choice["logprobs"], choice["text"]
    assert all(len(top) == 5 for top in told["top_logprobs"])
    at = 0
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert at <= offset <= len(text)
        at = offset
        if "\ufffd" not in token:
            assert text[offset:].startswith(token) or text.startswith(token.lstrip())
    native = {
        "prompt": _PROMPT,
        "temperature": 4.0,
        "seed": seed,
        "n_predict": 40,
        "n_probs": 5,
        "ignore_eos": True,
    }
    answer = http.post("/completion", json=native).json()
    spelled = b"".join(bytes(e["bytes"]) for e in answer["completion_probabilities"])
    assert spelled.decode("utf-8", "replace") == answer["content"]


def test_tokens_of_an_omitted_stop_text_have_no_logprobs(http: httpx.Client) -> None:
    body = {"prompt": "One two three four", "temperature": 0, "max_tokens": 24, "logprobs": 0}
    free = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    rng = random.Random(7)
    starts = [rng.randrange(len(free) - 1) for _ in range(8)]
    for stop in (
        free[3:6],
        free[8:13],
        free[2:3],
        *(free[a : a + rng.randint(1, 7)] for a in starts),
    ):
        choice = http.post("/v1/completions", json={**body, "stop": [stop]}).json()["choices"][0]
        assert choice["text"] == free[: free.index(stop)]
        spelled = "".join(choice["logprobs"]["tokens"]) if choice["logprobs"] else ""
        # The last token may contain the beginning of the stop text.
        assert spelled.startswith(choice["text"])
        assert (
            len("".join(choice["logprobs"]["tokens"][:-1])) < max(1, len(choice["text"]))
            if spelled
            else True
        )


@pytest.mark.parametrize(
    ("path", "body", "used"),
    [
        (
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 0},
            lambda b: b["usage"]["completion_tokens"],
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 0},
            lambda b: b["usage"]["completion_tokens"],
        ),
        ("/completion", {"prompt": "a", "n_predict": 0}, lambda b: b["tokens_predicted"]),
        ("/v1/messages", {"messages": HI, "max_tokens": 0}, lambda b: b["usage"]["output_tokens"]),
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 0},
            lambda b: b["usage"]["output_tokens"],
        ),
        (
            "/api/generate",
            {"prompt": "a", "stream": False, "options": {"num_predict": 0}},
            lambda b: b["eval_count"],
        ),
        (
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 0, "tools": [TOOL], "tool_choice": "required"},
            lambda b: (
                b["usage"]["completion_tokens"] + ("tool_calls" in b["choices"][0]["message"])
            ),
        ),
    ],
)
def test_a_limit_of_zero_tokens_generates_none(
    http: httpx.Client, path: str, body: dict[str, Any], used: Any
) -> None:
    answer = http.post(path, json=body)
    assert (answer.status_code, used(answer.json())) == (200, 0), answer.text


def test_token_pieces_that_are_not_text_are_returned_as_bytes(http: httpx.Client) -> None:
    pieces = http.post("/tokenize", json={"content": _PROMPT, "with_pieces": True}).json()["tokens"]
    assert any(isinstance(p["piece"], list) for p in pieces)
    data = b"".join(
        bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces
    )
    assert data.decode() == _PROMPT


@pytest.mark.parametrize("kind", ["texts", "ids", "mixed", "both"])
def test_prompts_come_in_every_form(http: httpx.Client, kind: str) -> None:
    ids = http.post("/tokenize", json={"content": "One two"}).json()["tokens"]
    sent: Any = {
        "texts": ["One two", "x"],
        "ids": [ids, ids],
        "mixed": ["One", *ids[1:]],
        "both": [ids, "One two"],
    }[kind]
    answer = http.post(
        "/completion", json={"prompt": sent, "n_predict": 4, "temperature": 0}
    ).json()
    alone = http.post(
        "/completion", json={"prompt": "One two", "n_predict": 4, "temperature": 0}
    ).json()["content"]
    assert (answer if kind == "mixed" else answer[0])["content"] == alone
    assert kind == "mixed" or len(answer) == 2


def test_a_bias_is_given_by_id_or_text(http: httpx.Client) -> None:
    body = {"prompt": "The capital of France is", "n_predict": 1, "temperature": 0}
    said = http.post("/completion", json=body).json()["content"]
    number = http.post("/tokenize", json={"content": said}).json()["tokens"][0]
    for bias in (
        [[number, False]],
        [[number, -100]],
        [[said, False]],
        {said: -100},
        {str(number): -100},
    ):
        assert http.post("/completion", json={**body, "logit_bias": bias}).json()["content"] != said
    openai = http.post("/v1/completions", json={"prompt": "a", "logit_bias": {"text": 1}})
    assert (openai.status_code, openai.json()["error"]["param"]) == (400, "logit_bias.text")
