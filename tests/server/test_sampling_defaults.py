"""A model's own sampling settings apply in every dialect, unless the request overrides them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Sampling
from localllm.server.models.router import ServedModel
from support.http_server import running_server
from support.scripted_engine import BOS, ScriptedEngine

# No field has the engine's default, so a field that is lost makes a test fail.
OWN = Sampling(
    temperature=0.31, top_k=17, top_p=0.83, min_p=0.11, typical_p=0.97, repeat_penalty=1.13,
    repeat_last_n=33,
    presence_penalty=1.5, frequency_penalty=0.4, seed=12, logit_bias={7: -2.0}, dry_multiplier=0.3,
    dry_base=1.5,
    dry_allowed_length=5, dry_penalty_last_n=77, dry_sequence_breakers=("q",), xtc_probability=0.2,
    xtc_threshold=0.3,
)  # fmt: skip
UNTHINKING = replace(OWN, temperature=0.72, top_p=0.81)
HI = [{"role": "user", "content": "hi"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "a"},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/api/chat": {"messages": HI, "stream": False},
    "/api/generate": {"prompt": "a", "stream": False},
    "/completion": {"prompt": "a"},
    "/infill": {"input_prefix": "a"},
}


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(fim_tokens={"pre": 200, "suf": 201, "mid": 202}, bos_token=BOS)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server(
            [ServedModel("tiny", engine, sampling=OWN, sampling_unthinking=UNTHINKING)]
        ) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def reached(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: dict[str, Any]
) -> Sampling:
    r = http.post(path, json=body)
    assert r.status_code == 200, r.text
    return engine.requests[-1].generation.sampling


@pytest.mark.parametrize("path", PLAIN)
def test_a_request_without_sampling_gets_all_of_the_models_defaults(
    http: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    assert reached(http, engine, path, PLAIN[path]) == OWN


@pytest.mark.parametrize("path", PLAIN)
def test_a_request_with_one_sampling_field_changes_only_that_default(
    http: httpx.Client, engine: ScriptedEngine, path: str
) -> None:
    said = {"temperature": 0.5}
    body = {**PLAIN[path], **({"options": said} if path.startswith("/api/") else said)}
    assert reached(http, engine, path, body) == replace(OWN, temperature=0.5)


OFF: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"reasoning_effort": "none"}),
    ("/v1/chat/completions", {"reasoning": {"enabled": False}}),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}),
    ("/v1/responses", {"reasoning": {"effort": "none"}}),
    ("/v1/messages", {"thinking": {"type": "disabled"}}),
    ("/api/chat", {"think": False}),
    ("/api/generate", {"think": False}),
]


@pytest.mark.parametrize(("path", "off"), OFF)
def test_a_request_without_reasoning_gets_the_defaults_for_that_mode(
    http: httpx.Client, engine: ScriptedEngine, path: str, off: dict[str, Any]
) -> None:
    assert reached(http, engine, path, {**PLAIN[path], **off}) == UNTHINKING
    named = (
        {"options": {"temperature": 0.31}} if path.startswith("/api/") else {"temperature": 0.31}
    )
    assert reached(http, engine, path, {**PLAIN[path], **off, **named}) == replace(
        UNTHINKING, temperature=0.31
    )


def test_a_seed_of_minus_one_selects_a_random_seed(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    for path, body in {
        "/v1/chat/completions": {"seed": -1}, "/v1/responses": {"seed": -1}, "/api/chat": {"options": {"seed": -1}},
    }.items():  # fmt: skip
        assert reached(http, engine, path, {**PLAIN[path], **body}) == replace(OWN, seed=None), path
