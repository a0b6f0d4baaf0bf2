"""Compaction of a conversation of 40 turns with tools: tokens saved, and facts retained.

Afterwards the model can still answer from kept facts, and can name the calls of those left out.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx

from localllm.engine.messages import Request
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

TURNS = 40
KEPT = range(0, TURNS, 4)
SYSTEM = "You inspect a ship. " * 10
PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
FACT = "deck {} has {} rivets"
ASKED = re.compile(r"How many rivets has deck (\d+)\?")


def fact(i: int) -> str:
    return FACT.format(i, 1000 + 7 * i)


class Reader:
    """A model that answers from its prompt: with the fact, or with the name of the call that has
    it."""

    def __call__(self, request: Request) -> list[str]:
        prompt = str(request.prompt)
        if "replaced by a summary that you write now" in prompt:
            return ["\n".join(fact(i) for i in KEPT)]
        asked = ASKED.findall(prompt)
        if not asked:
            return ["Aye."]
        deck = int(asked[-1])
        if fact(deck) in prompt:
            return [fact(deck)]
        line = f'read_file {{"path": "deck{deck}.log"}}'
        left_out = f"[The result of {line} was left out]" in prompt or f"\n{line}\n" in prompt
        return [f"left out: {line}" if left_out else "unknown"]


def responses() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for i in range(TURNS):
        call = {"type": "function_call", "call_id": f"c{i}", "name": "read_file"}
        output = f"{fact(i)}. " + f"plate {i} is sound. " * 150
        items += [
            {"role": "user", "content": f"Go on with {i}."},
            {**call, "arguments": json.dumps({"path": f"deck{i}.log"})},
            {"type": "function_call_output", "call_id": f"c{i}", "output": output},
            {"role": "assistant", "content": f"Read, number {i}."},
        ]
    return items


def messages() -> list[dict[str, Any]]:
    """Return the same conversation in Anthropic's dialect."""
    turns: list[dict[str, Any]] = []
    for i in range(TURNS):
        used = {"type": "tool_use", "id": f"c{i}", "name": "read_file"}
        output = f"{fact(i)}. " + f"plate {i} is sound. " * 150
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": output}
        turns += [
            {"role": "user", "content": f"Go on with {i}."},
            {"role": "assistant", "content": [{**used, "input": {"path": f"deck{i}.log"}}]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"Read, number {i}."},
        ]
    return turns


QUESTIONS = range(0, TURNS, 4), range(1, TURNS, 4), range(2, TURNS, 4)


def question(deck: int) -> dict[str, Any]:
    return {"role": "user", "content": f"How many rivets has deck {deck}?"}


def test_replacing_old_tool_results_saves_tokens_and_keeps_recent_facts() -> None:
    engine = ScriptedEngine(Reader(), n_ctx=400_000)
    uses = {"type": "tool_uses", "value": 3}
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": uses, "keep": uses}]}
    tools = [{"name": "read_file", "input_schema": PATH}]
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
    ):

        def ask(deck: int, **more: Any) -> tuple[str, int]:
            sent = {"messages": [*messages(), question(deck)], "tools": tools, "system": SYSTEM}
            reply = http.post("/v1/messages", json={**sent, "max_tokens": 99, **more}).json()
            return reply["content"][0]["text"], reply["usage"]["input_tokens"]

        before = ask(0)[1]
        answers = {i: ask(i, context_management=edits) for part in QUESTIONS for i in part}
    assert len(answers) == 30
    assert max(tokens for _, tokens in answers.values()) <= 0.4 * before
    for i, (said, _) in answers.items():
        kept = i >= TURNS - 3
        assert said == (fact(i) if kept else f'left out: read_file {{"path": "deck{i}.log"}}')


def test_a_summary_by_the_model_saves_tokens_and_keeps_facts() -> None:
    engine = ScriptedEngine(Reader(), n_ctx=400_000)
    tools = [{"type": "function", "name": "read_file", "parameters": PATH}]
    with (
        running_server({"m": engine}) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as http,
    ):

        def post(given: list[Any]) -> dict[str, Any]:
            sent = {"input": given, "tools": tools, "instructions": SYSTEM}
            body: dict[str, Any] = http.post("/v1/responses", json=sent).json()
            return body

        before = post([*responses(), question(0)])["usage"]["input_tokens"]
        (item,) = post([*responses(), {"type": "compaction_trigger"}])["output"]
        answers = {i: post([item, question(i)]) for part in QUESTIONS for i in part}
    assert len(answers) == 30
    assert max(body["usage"]["input_tokens"] for body in answers.values()) <= 0.15 * before
    for i, body in answers.items():
        said = body["output"][0]["content"][0]["text"]
        assert said == (fact(i) if i in KEPT else f'left out: read_file {{"path": "deck{i}.log"}}')
