"""Texts for clients: refusals in our own words, suggested paths, and lists in the client's
format."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import anthropic
import httpx
import pytest

from localllm.errors import RequestError
from localllm.server.dialects import known
from localllm.server.models.router import ServedModel
from server.test_every_field import BODIES
from support.http_server import Running, running_server
from support.scripted_engine import ScriptedEngine

# The beginnings of pydantic's messages, and names that only pydantic would use.
PYDANTICS = re.compile(
    r"Input should|Field required|valid (string|integer|number|list|dictionary|boolean)|Extra inputs|"
    r"pydantic|Value error|validation error|\b[A-Z][a-z]+[A-Z]\w+\b|\w_(type|parsing)\b"
)
WRONG: list[Any] = [None, True, -(10**9), 0.5, 10**30, "x", "", [], [None], [[1]], {}, {"a": 1}]


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = ScriptedEngine(n_ctx=30_000)
    physics = {"max_context": 65_536}
    models = [
        ServedModel("tiny", engine, aliases=("small", "gpt-*"), physics=physics),
        ServedModel("short", ScriptedEngine(n_ctx=64), physics=physics),
        ServedModel("full", ScriptedEngine(n_ctx=64), physics={"max_context": 64}),
    ]
    with running_server(models) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_no_refusal_contains_the_validators_text(path: str) -> None:
    """Every field, also inside objects, is tried with values of wrong types.

    The messages read here are those that a client receives.
    """
    kind, _ = BODIES[path]
    refusals: list[RequestError] = []
    for name, inside in known.shape_of(kind).items():
        nested = (
            [{key: wrong} for key in inside if key for wrong in WRONG]
            if isinstance(inside, dict)
            else []
        )
        for value in (*WRONG, *nested):
            with suppress(RequestError):
                known.read(kind, {name: value})
                continue
            with pytest.raises(RequestError) as refused:
                known.read(kind, {name: value})
            refusals.append(refused.value)
    said = [refusal.message for refusal in refusals]
    assert len(said) > 20
    assert [text for text in said if PYDANTICS.search(text)] == []


def test_a_value_of_an_accepted_type_is_not_reported_as_another_type() -> None:
    """A value of an accepted type is not reported as the other accepted type.

    Biases may be an object or a list. If an object has too many entries, the message does not
    demand a list.
    """
    many = {str(token): 1 for token in range(5_000)}
    with pytest.raises(RequestError) as refused:
        known.read(BODIES["/v1/chat/completions"][0], {"messages": [], "logit_bias": many})
    assert refused.value.message == "logit_bias: has more than 4096 entries"


def test_every_error_type_of_the_validator_has_our_own_text() -> None:
    """The errors that a body can cause: types, lengths and ranges."""
    kinds = {
        "missing", "extra_forbidden", "none_required", "bool_type", "bool_parsing", "int_type",
        "int_parsing", "int_from_float", "float_type", "float_parsing", "finite_number",
        "string_type", "list_type", "dict_type", "model_type", "literal_error", "greater_than",
        "greater_than_equal", "less_than_equal", "too_short", "too_long", "string_too_long",
        "string_too_short", "union_tag_invalid", "union_tag_not_found", "model_attributes_type",
        "tuple_type",
    }  # fmt: skip
    values = dict.fromkeys(
        (
            "expected", "gt", "ge", "lt", "le", "actual_length", "min_length", "max_length",
            "expected_tags",
        ),
        "1",
    )  # fmt: skip
    said = {kind: known.problem_of([{"type": kind, "ctx": values}]) for kind in kinds}
    assert not [kind for kind, words in said.items() if words == known.problem_of([{"type": "?"}])]


def test_the_list_of_models_is_anthropic_s_to_its_clients(running: Running) -> None:
    client = anthropic.Anthropic(
        base_url=running.url, api_key="x", max_retries=0, _strict_response_validation=True
    )
    names = [model.id for model in client.models.list(limit=2)]
    assert names == ["tiny", "short", "full", "small"]
    page = client.models.list(limit=2)
    assert (page.has_more, page.first_id, page.last_id) == (True, "tiny", "short")
    before = client.models.list(before_id="small", limit=1)
    assert ([m.id for m in before.data], before.has_more) == (["full"], True)
    one = client.models.retrieve("small")
    assert (one.type, one.display_name) == ("model", "small")
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        client.models.retrieve("gone")
    plain = httpx.get(running.url + "/v1/models", trust_env=False).json()
    assert [m["id"] for m in plain["data"]] == ["tiny", "short", "full", "small"]
    tags = httpx.get(running.url + "/api/tags", trust_env=False).json()
    assert "small" in [m["name"] for m in tags["models"]]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/api/chat", "/api/chat"),
        ("/responses/input_tokens", ""),
        ("/messages", "/v1/messages"),
        ("/v1/none", ""),
    ],
)
def test_a_wrong_path_is_answered_with_the_likely_one(
    running: Running, path: str, meant: str
) -> None:
    reply = httpx.post(running.url + path, json={}, trust_env=False)
    hint = reply.json().get("error", {})
    said = hint if isinstance(hint, str) else hint.get("hint", "")
    assert reply.status_code == 404
    assert not meant or said == f"did you mean {meant}?"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v0/models"),
        ("GET", "/api/v1"),
        ("GET", "/api/v1/models"),
        ("POST", "/api/v1/chat"),
        ("POST", "/api/v1/chat/completions"),
        ("POST", "/api/v1/messages"),
    ],
)
def test_base_paths_of_lm_studio_and_lemonade_are_answered_with_ours(
    running: Running, method: str, path: str
) -> None:
    reply = httpx.request(method, running.url + path, trust_env=False)
    assert reply.status_code == 404
    assert f"set the base URL to {running.url}/v1" in reply.json()["error"]["hint"]


def test_a_request_to_a_base_url_names_the_paths_below_it(running: Running) -> None:
    error = httpx.get(running.url + "/v1", trust_env=False).json()["error"]
    assert "/chat/completions" in error["hint"]


def test_every_answer_has_a_date(running: Running) -> None:
    for path in ("/health", "/v1/models", "/none"):
        assert "GMT" in httpx.get(running.url + path, trust_env=False).headers["date"]


@pytest.mark.parametrize(
    ("path", "base"),
    [
        ("/v1/messages", {"max_tokens": 5}), ("/v1/chat/completions", {}),
        ("/api/chat", {"stream": False}),
    ],
)  # fmt: skip
def test_the_error_for_a_long_prompt_names_a_context_that_fits(
    running: Running, path: str, base: dict[str, Any]
) -> None:
    body = {**base, "messages": [{"role": "user", "content": "a long prompt " * 50}]}
    for model, wanted in (
        ("short", "--context: up to 65536 fits"),
        ("full", "no larger --context"),
    ):
        reply = httpx.post(running.url + path, json={**body, "model": model}, trust_env=False)
        assert reply.status_code == 400
        assert wanted in reply.text


def test_the_reply_to_a_seed_states_its_guarantee(running: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    url = running.url + "/v1/chat/completions"
    assert "x-localllm-seed" not in httpx.post(url, json=body, trust_env=False).headers
    seeded = httpx.post(url, json={**body, "seed": 1}, trust_env=False)
    assert "repeatable" in seeded.headers["x-localllm-seed"]


def test_a_custom_tool_streams_its_text() -> None:
    call = '<tool_call>\n{"name": "write", "arguments": {"input": "a\\nb"}}\n</tool_call>'
    tool = {"type": "custom", "custom": {"name": "write"}}
    with running_server({"tiny": ScriptedEngine([call])}) as running:
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "stream": True}
        text = httpx.post(running.url + "/v1/chat/completions", json=body, trust_env=False).text
    chunks = [json.loads(x[6:]) for x in text.splitlines() if x.startswith("data: {")]
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "write")
    assert "".join(c["custom"]["input"] for c in calls) == "a\nb"


@pytest.mark.parametrize("stream", [False, True])
def test_llama_cpp_s_answer_has_its_tokens_and_only_the_fields_asked_for(stream: bool) -> None:
    with running_server({"tiny": ScriptedEngine(["Hé", "llo"])}) as running:

        def answer(**more: Any) -> list[dict[str, Any]]:
            body = {"prompt": "a", "n_predict": 4, "stream": stream, **more}
            text = httpx.post(running.url + "/completion", json=body, trust_env=False).text
            lines = text.splitlines() if stream else [f"data: {text}"]
            return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

        ids = [i for part in answer(return_tokens=True) for i in part["tokens"]]
        assert ids == list("Hél".encode())
        # llama.cpp's streams always contain the ids (server_task_result_cmpl_partial).
        unasked = [i for part in answer() for i in part["tokens"]]
        assert unasked == (ids if stream else [])
        last = answer(response_fields=["content", "generation_settings/n_predict", "none"])[-1]
        assert last.keys() == {"content", "generation_settings/n_predict"}
        assert last["generation_settings/n_predict"] == 4
