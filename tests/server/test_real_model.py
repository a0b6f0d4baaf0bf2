"""The complete path with a real model: `openai`, HTTP, the worker process, llama.cpp, SmolLM2."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server
from support.until import until

QUESTION = [{"role": "user", "content": "Name the capital of France in one short sentence."}]


@pytest.fixture(scope="module")
def supervisor(smollm2: Path) -> Supervisor:
    return Supervisor(WorkerOptions(LoadSpec(path=str(smollm2), n_ctx=2048, n_seq_max=4)))


@pytest.fixture(scope="module")
def server(supervisor: Supervisor):
    with running_server({"smollm2": supervisor}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as c:
        yield c


def _ask(client: openai.OpenAI, **more):
    return client.chat.completions.create(
        model="smollm2", messages=QUESTION, **{"temperature": 0, **more}
    )


def test_whole_and_streamed_answers_agree(client: openai.OpenAI) -> None:
    whole = _ask(client, max_tokens=24)
    text = whole.choices[0].message.content
    assert "Paris" in text
    chunks = list(_ask(client, max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_max_tokens_stop_and_seed_are_honoured(client: openai.OpenAI) -> None:
    short = _ask(client, max_tokens=3)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 3)
    text = _ask(client, max_tokens=40).choices[0].message.content
    stopped = _ask(client, max_tokens=40, stop="Paris").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text.split("Paris")[0], "stop")
    first, second, other = (
        _ask(client, max_tokens=16, temperature=1.5, seed=seed).choices[0].message.content
        for seed in (5, 5, 6)
    )
    assert first == second != other


def test_a_schema_answer_continues_a_prefilled_beginning(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    begun = '{"capital": "P'
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[*QUESTION, {"role": "assistant", "content": begun}],
        temperature=0,
        max_tokens=40,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
    )
    value = json.loads(begun + (answer.choices[0].message.content or ""))
    assert list(value) == ["capital"]
    assert value["capital"].startswith("P")
    assert answer.choices[0].finish_reason == "stop"


def test_a_stop_that_spells_a_control_token_matches(client: openai.OpenAI) -> None:
    turn = "<|im_start|>user\nSay hi.<|im_end|>\n"
    for stop in ("<|im_start|>", "<|im_start|>assistant", "im_start|>ass"):
        choice = client.completions.create(
            model="smollm2", prompt=turn, temperature=0, max_tokens=12, stop=[stop]
        ).choices[0]
        assert (choice.text, choice.finish_reason) == ("", "stop"), stop


def test_logprobs_are_those_of_the_chosen_tokens(client: openai.OpenAI) -> None:
    content = _ask(client, max_tokens=4, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # greedy: the most likely token


def test_the_second_turn_reuses_the_first(client: openai.OpenAI) -> None:
    first = _ask(client, max_tokens=16)
    turn = [
        *QUESTION,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(
        model="smollm2", messages=turn, temperature=0, max_tokens=8
    )
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_killed_worker_fails_only_its_own_request(
    client: openai.OpenAI, server: Running, supervisor: Supervisor
) -> None:
    _ask(client, max_tokens=1)
    worker = supervisor.client
    assert worker is not None
    body = {"messages": QUESTION, "stream": True, "ignore_eos": True, "max_tokens": 1500}
    with httpx.stream(
        "POST", server.url + "/v1/chat/completions", json=body, timeout=60, trust_env=False
    ) as r:
        lines = r.iter_lines()
        next(line for line in lines if '"content":"' in line and '"content":""' not in line)
        os.kill(worker.pid, signal.SIGKILL)
        said = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert said[-1]["error"]["code"] == "worker_died"
    assert _ask(client, max_tokens=2).usage.completion_tokens == 2
    assert supervisor.client is not None
    assert supervisor.client.pid != worker.pid


def test_the_death_of_an_idle_worker_does_not_fail_the_next_request(
    client: openai.OpenAI, supervisor: Supervisor
) -> None:
    """The death of an idle worker does not fail the next request, noticed or not."""
    for noticed in (False, True):
        _ask(client, max_tokens=1)
        worker = supervisor.client
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        if noticed:
            until(lambda worker=worker: not worker.alive, "its end is not noticed")
        assert _ask(client, max_tokens=2).usage.completion_tokens == 2


def test_an_idle_worker_that_dies_is_restarted_before_the_next_request(
    client: openai.OpenAI, supervisor: Supervisor
) -> None:
    def end_it() -> None:
        worker = supervisor.client
        assert worker is not None
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: not worker.alive, "its end is not noticed")

    _ask(client, max_tokens=1)
    loads = supervisor.loads
    end_it()
    until(lambda: supervisor.loads == loads + 1, "the model is not loaded again")
    # A worker that ends again before it answers is not restarted until the next request. The cause
    # may be the file or the memory.
    end_it()
    assert _ask(client, max_tokens=2).usage.completion_tokens == 2
    assert supervisor.loads == loads + 2


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "days": {"type": "integer", "minimum": 1},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["utc", "local"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


def _fits(name: str, arguments: str) -> bool:
    given = json.loads(arguments)
    if name == "get_time":
        return given in ({"zone": "utc"}, {"zone": "local"})
    return set(given) == {"city", "days"} and isinstance(given["city"], str) and given["days"] >= 1


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_forced_calls_fit_their_schema(client: openai.OpenAI, choice, seed: int) -> None:
    ask = {
        "tools": [WEATHER, CLOCK],
        "tool_choice": choice,
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": 200,
    }
    (call,) = _ask(client, **ask).choices[0].message.tool_calls
    assert _fits(call.function.name, call.function.arguments)
    name, arguments, reason = "", "", None
    for chunk in _ask(client, **ask, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    # The calls may differ. A prompt that is cached, or was prefilled in other batches, has
    # different rounding, which may change a sample at temperature 1. Greedy answers are compared
    # above.
    assert (reason, _fits(name, arguments)) == ("tool_calls", True)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_fits_its_schema(client: openai.OpenAI, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "maxItems": 2,
                       "items": {"enum": ["a", "b"]}}},
        "required": ["name", "tags"],
        "additionalProperties": False,
    }  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    reply = _ask(client, response_format=wanted, temperature=1.2, seed=seed, max_tokens=200)
    value = json.loads(reply.choices[0].message.content)
    assert set(value) == {"name", "tags"}
    assert len(value["name"]) <= 12
    assert len(value["tags"]) <= 2
    assert set(value["tags"]) <= {"a", "b"}


def test_a_set_of_pydantics_is_accepted_and_named(client: openai.OpenAI) -> None:
    class Tagged(pydantic.BaseModel):
        tags: set[Literal["a", "b"]] = pydantic.Field(max_length=3)

    raw = client.chat.completions.with_raw_response.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Choose tags."}],
        response_format=Tagged,
        max_tokens=60,
    )
    assert "response_format.uniqueItems" in raw.headers["x-localllm-ignored"]
    parsed = raw.parse().choices[0].message.parsed
    assert parsed is not None
    assert parsed.tags <= {"a", "b"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cant_be_enforced_is_a_400_naming_it(
    client: openai.OpenAI, stream: bool
) -> None:
    schema = {"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="contains"):
        _ask(client, response_format=wanted, max_tokens=20, stream=stream)
