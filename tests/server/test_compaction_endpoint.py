"""A conversation that outgrows the context.

The request is refused with the token counts, or its oldest turns are left out if the client
asked for that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine

N_CTX = 1024
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SYSTEM = {"role": "system", "content": "You keep a diary of a ship."}
HEADER = re.compile(r"(\d+) messages, (\d+) tokens")


@pytest.fixture(scope="module")
def ship(few_layers: Path) -> Iterator[Running]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=N_CTX, n_seq_max=2)))
    with running_server({"smollm2": host}) as running:
        yield running


@pytest.fixture
def http(ship: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ship.url, timeout=60, trust_env=False) as client:
        yield client


def _days(n: int) -> list[dict[str, Any]]:
    """Return a diary of `n` answered days and a question, about 70 tokens a day."""
    turns: list[dict[str, Any]] = [SYSTEM]
    for day in range(n):
        turns += [
            {"role": "user",
            "content": f"Day {day}: the wind came from the north and we sailed for {day + 3} hours "
                                        "along the coast, past two islands and a lighthouse."},
            {"role": "assistant",
            "content": f"Noted for day {day}: northern wind, {day + 3} hours under sail."},
        ]  # fmt: skip
    return [*turns, {"role": "user", "content": f"What happened on day {n - 1}?"}]


def _ask(http: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": messages, "max_tokens": 4, "temperature": 0, **more})


def _counts(response: httpx.Response) -> tuple[int, int]:
    found = HEADER.fullmatch(response.headers["x-localllm-compacted"])
    assert found is not None
    return int(found[1]), int(found[2])


@pytest.mark.parametrize("more", [{}, {"truncation": "disabled"}, {"truncation": None}])
def test_a_full_context_is_refused_with_the_counts(
    http: httpx.Client, more: dict[str, Any]
) -> None:
    response = _ask(http, _days(40), **more)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(N_CTX) in error["message"]
    assert int(re.search(r"has (\d+) tokens", error["message"])[1]) > N_CTX


def test_a_client_that_requests_truncation_gets_an_answer_and_the_counts(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    refused = _ask(http, _days(40)).json()["error"]["message"]
    with caplog.at_level(logging.INFO, "localllm.server"):
        response = _ask(http, _days(40), truncation="auto")
    assert response.status_code == 200
    messages, tokens = _counts(response)
    usage = response.json()["usage"]
    assert messages % 2 == 0
    assert usage["prompt_tokens"] + tokens == int(re.search(r"has (\d+) tokens", refused)[1])
    # The estimate is close: a cut leaves 60 % of the space for turns, and never more than all of
    # it.
    assert 0.5 * N_CTX < usage["prompt_tokens"] <= N_CTX - 4
    assert f"omitted {messages} messages, {tokens} tokens" in caplog.text


def test_a_conversation_that_fits_is_not_compacted(http: httpx.Client) -> None:
    response = _ask(http, _days(3), truncation="auto")
    assert response.status_code == 200
    assert "x-localllm-compacted" not in response.headers


def test_the_prefix_holds_over_the_following_turns(http: httpx.Client) -> None:
    """The cut moves only once in several turns.

    Until it moves, all tokens except those of the new turn come from the cache.
    """
    cuts: list[int] = []
    for n in range(20, 36):
        response = _ask(http, _days(n), truncation="auto")
        assert response.status_code == 200
        cuts.append(_counts(response)[0])
        usage = response.json()["usage"]
        if len(cuts) > 2 and cuts[-3] == cuts[-2] == cuts[-1]:
            new = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert new < 110, f"turn {n} computed {new} tokens of {usage['prompt_tokens']} again"
    assert cuts == sorted(cuts)
    moves = sum(a != b for a, b in pairwise(cuts))
    assert 1 <= moves <= 4


def test_a_stream_reports_compaction_in_the_header_or_in_a_comment(http: httpx.Client) -> None:
    body = {"messages": _days(40), "max_tokens": 4, "stream": True, "truncation": "auto"}
    response = http.post(CHAT, json=body)
    comment = next(line for line in response.text.splitlines() if line.startswith(": compacted "))
    assert HEADER.fullmatch(comment.removeprefix(": compacted "))
    assert response.headers.get("x-localllm-compacted", comment).endswith(
        comment.removeprefix(": compacted ")
    )


def test_responses_grow_by_reference_and_are_compacted(http: httpx.Client) -> None:
    day = {"max_output_tokens": 4, "temperature": 0, "instructions": "You keep a diary."}
    said = (
        "the wind came from the north and we sailed along the coast, past islands and a "
        "lighthouse. "
    ) * 20
    last: dict[str, Any] = {}
    told = []
    for i in range(4):
        body = {
            **day,
            "input": f"Day {i}: {said}",
            "previous_response_id": last.get("id"),
            "truncation": "auto",
        }
        response = http.post(RESPONSES, json=body)
        assert response.status_code == 200, response.text
        last = response.json()
        told.append("x-localllm-compacted" in response.headers)
        assert last["truncation"] == "auto"
    assert told[0] is False
    assert told[-1] is True
    over = http.post(
        RESPONSES, json={**day, "input": "And now?", "previous_response_id": last["id"]}
    )
    assert over.json()["error"]["code"] == "context_length_exceeded"
    stream = http.post(
        RESPONSES,
        json={
            **day,
            "input": "?",
            "previous_response_id": last["id"],
            "truncation": "auto",
            "stream": True,
        },
    )
    assert ": compacted " in stream.text


def test_a_newest_turn_too_large_by_itself_is_refused_with_the_counts(http: httpx.Client) -> None:
    messages = [*_days(5)[:-1], {"role": "user", "content": "north " * 2000}]
    response = _ask(http, messages, truncation="auto")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    found = re.search(r"has (\d+) tokens, and (\d+) without the 10 messages", error["message"])
    assert found is not None
    assert int(found[1]) > int(found[2]) > 2000
    assert str(N_CTX) in error["message"]


# --- with a scripted engine, whose tokens are bytes -----------------------------------------------

THINKER = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content and loop.index0 > (messages | length) - 4 %}<think>{{ "
    "m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | "
    "tojson }}</call>"
    "{% endfor %}\n{% endfor %}<|assistant|>{% if tools %}{% endif %}"
)
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def _agent(rounds: int) -> list[dict[str, Any]]:
    """Return one question, and `rounds` calls of an agent with their results."""
    messages: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": "Find the leak."}]
    for i in range(rounds):
        call = {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "look", "arguments": f'{{"deck": {i}}}'},
        }
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call],
                "reasoning_content": "hm " * 20,
            },
            {"role": "tool", "tool_call_id": f"c{i}", "content": f"deck {i} is dry " + "." * 80},
        ]
    return messages


@pytest.mark.parametrize("rounds", [10, 40])
def test_an_agent_at_one_question_loses_its_oldest_rounds(rounds: int) -> None:
    engine = ScriptedEngine(["ok"], n_ctx=2048, chat_template=THINKER)
    body = {"messages": _agent(rounds), "tools": [LOOK], "tool_choice": "none", "max_tokens": 64}
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert http.post(CHAT, json={**body, "messages": _agent(40)}).status_code == 400
        response = http.post(CHAT, json={**body, "truncation": "auto"})
    assert response.status_code == 200
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, str)
    assert len(prompt) <= 2048 - 64
    assert "Find the leak." in prompt
    assert f"deck {rounds - 1} is dry" in prompt
    gone = rounds - prompt.count("is dry")
    assert gone == rounds - prompt.count("<call>")
    assert (f"Find the leak.\n\n[{2 * gone} earlier messages were omitted" in prompt) == (gone > 0)
    assert ("x-localllm-compacted" in response.headers) == (rounds == 40)


def test_counts_that_are_too_low_cost_a_second_cut_and_no_error() -> None:
    """A token count that is too low costs a second cut, not an error.

    The template writes every message three times. The count includes the template's frame once,
    but each text only once.
    """
    thrice = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.content }}{{ m.content "
        "}}\n{% "
        "endfor %}"
    )
    engine = ScriptedEngine(["ok"], n_ctx=2048, chat_template=thrice)
    messages: list[dict[str, Any]] = []
    for i in range(30):
        messages += [
            {"role": "user", "content": f"{i} " + "q" * 40},
            {"role": "assistant", "content": "a" * 40},
        ]
    body = {"messages": [*messages, {"role": "user", "content": "last"}], "truncation": "auto"}
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        response = http.post(CHAT, json=body)
    assert response.status_code == 200
    prompt = engine.requests[-1].prompt
    assert isinstance(prompt, str)
    assert 2048 // 4 < len(prompt) <= 2048 * 3 // 4
    assert prompt.endswith("lastlastlast\n")


def test_a_stream_whose_headers_left_early_has_the_comment() -> None:
    engine = ScriptedEngine(["ok"], n_ctx=512)
    engine.load_gate = Gate()
    day = ({"role": "user", "content": "x" * 60}, {"role": "assistant", "content": "noted"})
    messages = [message for _ in range(9) for message in day]
    body = {
        "messages": [*messages, {"role": "user", "content": "last"}],
        "truncation": "auto",
        "stream": True,
    }
    with (
        running_server({"m": engine}, grace_s=0.05) as server,
        httpx.stream("POST", server.url + CHAT, json=body, trust_env=False) as response,
    ):
        assert "x-localllm-compacted" not in response.headers
        engine.load_gate.open()
        lines = [line for line in response.iter_lines() if line]
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert [line for line in lines[:first] if line.startswith(": compacted ")]
