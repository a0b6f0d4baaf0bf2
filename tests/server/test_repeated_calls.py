"""Repeated, parallel and required calls.

Several equal calls in one reply may be intended, so all arrive. A call that repeats many times
ends the answer. A required call is made with any format of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from localllm.engine.messages import Request
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine, grammar_of

ROLL = {"type": "function", "function": {"name": "roll", "parameters": {"type": "object"}}}
HERMES = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ "
    "m.content "
    "}}{% endfor %}"
)


class Caller:
    """A model that makes these calls one after another, and then writes "Rolled."

    `ends` is the end of a constrained call.
    """

    def __init__(self, sides: Sequence[int], ends: str = "}") -> None:
        self._sides, self._ends = sides, ends

    def __call__(self, request: Request) -> list[str]:
        calls = [
            f'<tool_call>{{"name": "roll", "arguments": {{"sides": {n}}}{self._ends}'
            for n in self._sides
        ]
        return list("".join(calls) + "Rolled.")


def answer(caller: Caller, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    engine = ScriptedEngine(caller, chat_template=HERMES)
    asked = {"messages": [{"role": "user", "content": "Roll."}], "tools": [ROLL], **body}
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        return http.post(path, json=asked)


def sides(reply: httpx.Response) -> list[int]:
    calls = reply.json()["choices"][0]["message"]["tool_calls"]
    return [json.loads(call["function"]["arguments"])["sides"] for call in calls]


@pytest.mark.parametrize("made", [[6, 6], [6, 6, 8, 8], [6, 8, 6, 8], [6, 6, 6], list(range(9))])
def test_calls_that_are_the_same_all_arrive(made: list[int]) -> None:
    assert sides(answer(Caller(made))) == made


def test_a_call_without_end_ends_the_answer() -> None:
    assert sides(answer(Caller([6] * 50))) == [6] * 4
    assert sides(answer(Caller([6, 8] * 50)))[-1:] == [6]


def test_a_constrained_call_that_ends_in_open_json_is_not_an_error() -> None:
    reply = answer(Caller([6, 6], ends=""))
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["finish_reason"] in ("tool_calls", "stop")


def test_two_calls_are_two_lines_of_ollamas_stream() -> None:
    reply = answer(Caller([6, 8]), "/api/chat", stream=True)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    calls = [line["message"]["tool_calls"] for line in lines if line["message"].get("tool_calls")]
    assert [[c["function"]["arguments"] for c in line] for line in calls] == [
        [{"sides": 6}],
        [{"sides": 8}],
    ]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "roll"}}])
@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}},
    ],
)
def test_a_required_call_is_made_and_response_format_is_named_as_ignored(
    choice: Any, form: Any
) -> None:
    engine = ScriptedEngine(list('{"sides": 6}'), chat_template=HERMES)
    asked = {
        "messages": [{"role": "user", "content": "Roll."}],
        "tools": [ROLL],
        "tool_choice": choice,
        "response_format": form,
    }
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        reply = http.post("/v1/chat/completions", json=asked)
    assert sides(reply) == [6]
    assert "response_format" in reply.headers["x-localllm-ignored"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_schema_that_is_not_strict_is_loosened_and_the_keyword_named(path: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "contains": {}}}}
    shape = {"name": "x", "schema": schema, "strict": False}
    form = {"text": {"format": {"type": "json_schema", **shape}}, "input": "Hi"}
    named = "text.format.contains"
    if path == "/v1/chat/completions":
        form = {"response_format": {"type": "json_schema", "json_schema": shape}}
        named = "response_format.contains"
    engine = ScriptedEngine(["{}"])
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        reply = http.post(path, json={"messages": [{"role": "user", "content": "Hi"}], **form})
    assert reply.status_code == 200, reply.text
    assert named in reply.headers["x-localllm-ignored"].split(",")
    kind, source = grammar_of(engine.requests[-1]) or ("", "")
    assert (kind, '"lenient"' in source) == ("json_schema", True)


NAMES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"guided_json": {"type": "null"}}, ("json_schema", '{"type": "null"}')),
    ({"guided_json": '{"type": "null"}'}, ("json_schema", '{"type": "null"}')),
    ({"guided_regex": "a+"}, ("regex", "a+")),
    ({"guided_choice": ["yes", "n.o"]}, ("regex", r"yes|n\.o")),
    ({"guided_grammar": 'root ::= "a"'}, ("gbnf", 'root ::= "a"')),
    ({"structured_outputs": {"json": {"type": "null"}}}, ("json_schema", '{"type": "null"}')),
    ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+")),
    ({"structured_outputs": {"choice": ["a|b"]}}, ("regex", r"a\|b")),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, ("gbnf", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True}}, ("json_schema", '{"type": "object"}')),
    ({"regex": "a+"}, ("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, ("gbnf", 'root ::= "a"')),
    ({"json_schema": '{"type": "null"}'}, ("json_schema", '{"type": "null"}')),
]


@pytest.mark.parametrize(("sent", "grammar"), NAMES)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_grammar_fields_of_other_servers_have_their_meaning_there(
    path: str, sent: dict[str, Any], grammar: tuple[str, str]
) -> None:
    engine = ScriptedEngine(["a"])
    asked = (
        {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    )
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False) as http,
    ):
        assert http.post(path, json={**asked, **sent}).status_code == 200
        both = http.post(path, json={**asked, **sent, "response_format": {"type": "json_object"}})
        bad = http.post(path, json={**asked, "guided_json": "{", "structured_outputs": None})
        unknown = http.post(path, json={**asked, "structured_outputs": {"structural_tag": "x"}})
    assert grammar_of(engine.requests[-1]) == grammar
    assert (both.status_code, bad.status_code, unknown.status_code) == (400, 400, 400)
    assert "structural_tag" in unknown.text
