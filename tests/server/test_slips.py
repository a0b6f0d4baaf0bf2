"""Replies to common mistakes: they name the fault and the next step."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with (
        running_server({"smollm2-135m-instruct": ScriptedEngine()}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("method", "path", "answers"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/responses/x", "DELETE, GET, HEAD"),
    ],
)
def test_a_wrong_method_is_answered_with_the_allowed_ones(
    http: httpx.Client, method: str, path: str, answers: str
) -> None:
    reply = http.request(method, path, json={})
    assert reply.status_code == 405
    assert reply.headers["allow"] == answers
    assert reply.json()["error"]["hint"] == f"it answers {answers}"


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "smollm2-135m-instrukt"])
def test_a_partial_or_mistyped_model_name_is_answered_with_the_complete_name(
    http: httpx.Client, name: str
) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", "model": name})
    assert reply.status_code == 404
    assert reply.json()["error"]["hint"] == "did you mean smollm2-135m-instruct?"


def test_the_error_for_a_model_without_fill_in_names_the_way_to_find_one(
    http: httpx.Client,
) -> None:
    reply = http.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert reply.status_code == 400
    assert "recommend --for autocomplete" in reply.json()["error"]["hint"]
