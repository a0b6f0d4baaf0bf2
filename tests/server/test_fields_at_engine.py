"""Fields that change an answer, with a real engine.

Each changes the model's text, in every OpenAI dialect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED = "one two one two one two one two one two one two"
HOT = {"temperature": 50, "seed": 1}
TOKENS = 12


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    cached: int
    ended: str


class Model:
    """The model behind one dialect. Each method sends the fields of one case."""

    def __init__(self, http: httpx.Client, path: str) -> None:
        self._http, self._path = http, path

    def answer(self, **fields: Any) -> Answer:
        body = {"temperature": 0, "seed": 1, "max_tokens": TOKENS, **fields}
        if self._path == RESPONSES:
            sent = {"input": ASKED, "max_output_tokens": body.pop("max_tokens"), **body}
        else:
            sent = (
                {"prompt": ASKED, **body}
                if self._path == TEXT
                else {"messages": [_user(ASKED)], **body}
            )
        reply = self._http.post(self._path, json=sent)
        assert reply.status_code == 200, reply.text
        said = reply.json()
        assert "x-localllm-ignored" not in reply.headers
        usage = said["usage"]
        if self._path == RESPONSES:
            parts = [p["text"] for item in said["output"] for p in item["content"]]
            cached = usage["input_tokens_details"]["cached_tokens"]
            return Answer("".join(parts), usage["output_tokens"], cached, said["status"])
        choice = said["choices"][0]
        text = choice["text"] if self._path == TEXT else choice["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Answer(text, usage["completion_tokens"], cached, choice["finish_reason"])

    def token(self, text: str) -> int:
        (first, *_) = self._http.post("/tokenize", json={"content": text}).json()["tokens"]
        return int(first)


def _user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


@pytest.fixture(scope="module")
def http(few_layers: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=1024, n_seq_max=2)))
    with (
        running_server({"smollm2": host}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.fixture(params=[CHAT, TEXT, RESPONSES])
def model(http: httpx.Client, request: pytest.FixtureRequest) -> Model:
    return Model(http, request.param)


def test_some_sampling_fields_make_a_high_temperature_greedy(model: Model) -> None:
    greedy, hot = model.answer(), model.answer(**HOT)
    assert hot.text != greedy.text
    assert model.answer(**HOT).text == hot.text
    assert model.answer(**{**HOT, "seed": 2}).text != hot.text
    for field, value in (("top_k", 1), ("min_p", 1), ("top_p", 0)):
        assert model.answer(**HOT, **{field: value}).text == greedy.text, field
    one, other = (model.answer(**{**HOT, "seed": seed, "typical_p": 0}).text for seed in (1, 2))
    assert one == other


@pytest.mark.parametrize(
    "fields",
    [
        {"repeat_penalty": 3}, {"presence_penalty": 2, "frequency_penalty": 2}, {"dry_multiplier": 5, "dry_allowed_length": 1},
    ],
    ids=str,
)  # fmt: skip
def test_penalty_fields_reduce_repetition(model: Model, fields: dict[str, Any]) -> None:
    loop = {"logit_bias": {str(model.token(" two")): 12, str(model.token(" one")): 12}}
    plain = model.answer(**loop, max_tokens=30)
    kept = model.answer(**loop, max_tokens=30, **fields)
    assert kept.text != plain.text
    assert kept.text.count("one two") < plain.text.count("one two") or kept.text.count(
        "two two"
    ) < plain.text.count("two two")


def test_xtc_leaves_out_the_likeliest_tokens(model: Model) -> None:
    cool = {"temperature": 0.05}
    assert (
        model.answer(**cool, xtc_probability=1, xtc_threshold=0.01).text
        != model.answer(**cool).text
    )
    assert (
        model.answer(**cool, xtc_probability=1, xtc_threshold=0.6).text == model.answer(**cool).text
    )


def test_a_large_logit_bias_forces_its_token(model: Model) -> None:
    only = {"logit_bias": {str(model.token(" two")): 100}}
    assert model.answer(**only).text.split() == ["two"] * TOKENS


def test_stop_fields_and_limits_end_an_answer(model: Model) -> None:
    token = model.token(" two")
    only = {"logit_bias": {str(token): 100}}
    assert model.answer(**only, stop=["two two two"]).tokens <= 4
    assert model.answer(**only, stop_token_ids=[token]).tokens <= 1
    assert 5 <= model.answer(**only, stop_token_ids=[token], min_tokens=5).tokens <= 6
    assert model.answer(**only, max_tokens=3).tokens == 3
    assert model.answer(**only, max_tokens=400, t_max_predict_ms=20).tokens < 400
    looping = model.answer(
        **only, max_tokens=60, repetition_detection={"max_pattern_size": 2, "min_count": 8}
    )
    assert looping.tokens < 30
    # The bias permits only the end of the turn, so the answer continues only without that end.
    end = {"logit_bias": {str(model.token("<|im_end|>")): 100}}
    assert model.answer(**end).tokens <= 1
    assert model.answer(**end, ignore_eos=True).tokens == TOKENS


def test_a_grammar_or_schema_is_enforced(model: Model) -> None:
    assert model.answer(grammar='root ::= "xyz" [0-9]').text[:3] == "xyz"
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["q"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert "".join(model.answer(json_schema=schema, max_tokens=40).text.split()) == '{"a":"q"}'


def test_a_prompt_is_prefilled_again_on_request(model: Model) -> None:
    model.answer()
    assert model.answer().cached > 0
    assert model.answer(cache_prompt=False).cached == 0


def test_an_answer_that_ends_inside_a_character_ends_before_it(model: Model) -> None:
    """The character has four bytes, which this vocabulary splits into several tokens."""
    for limit in range(1, 6):
        answer = model.answer(grammar='root ::= "𓀀𓀀𓀀"', max_tokens=limit)
        assert "\ufffd" not in answer.text
        assert set(answer.text) <= {"𓀀"}
