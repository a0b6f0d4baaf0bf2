"""Anthropic's `context_management`.

The tests check which results and reasoning each edit removes, what the answer reports, and which
part of the cached prefix remains valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}\n{% endfor %}<|assistant|>"
)
TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in ("read", "note")]
RESULT = "all dry " * 40


def uses(n: int) -> dict[str, Any]:
    return {"type": "tool_uses", "value": n}


def conversation(rounds: int) -> list[dict[str, Any]]:
    """Return `rounds` questions, each with reasoning, a call, its result and an answer.

    Every third call is of `note`.
    """
    messages: list[dict[str, Any]] = []
    for i in range(rounds):
        name = "note" if i % 3 == 2 else "read"
        call = {"type": "tool_use", "id": f"t{i}", "name": name, "input": {"deck": i}}
        thought = {"type": "thinking", "thinking": f"thought {i}", "signature": "s"}
        result = {"type": "tool_result", "tool_use_id": f"t{i}", "content": f"deck {i}: {RESULT}"}
        messages += [
            {"role": "user", "content": f"Deck {i}?"},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": f"Deck {i} is fine."},
        ]
    return [*messages, {"role": "user", "content": "And now?"}]


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(["Aye."], chat_template=TEMPLATE, n_ctx=60_000)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"m": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def body(*edits: dict[str, Any], rounds: int = 8, **more: Any) -> dict[str, Any]:
    managed = {"context_management": {"edits": list(edits)}} if edits else {}
    return {"messages": conversation(rounds), "tools": TOOLS, "max_tokens": 8, **managed, **more}


def asked(
    http: httpx.Client, engine: ScriptedEngine, *edits: dict[str, Any], **more: Any
) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Return the prompt, the applied edits and the usage."""
    reply = http.post(MESSAGES, json=body(*edits, **more))
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    applied = answer["context_management"]["applied_edits"] if edits else []
    return str(engine.requests[-1].prompt), applied, answer["usage"]


def decks_read(prompt: str) -> list[int]:
    return [i for i in range(20) if f"deck {i}: all dry" in prompt]


CASES: list[tuple[dict[str, Any], list[int]]] = [
    ({"trigger": uses(7)}, [5, 6, 7]),
    ({"trigger": uses(8)}, [*range(8)]),
    ({"trigger": uses(0), "keep": uses(1)}, [7]),
    ({"trigger": uses(0), "keep": uses(0)}, []),
    ({"trigger": uses(0), "keep": uses(9)}, [*range(8)]),
    ({"trigger": uses(0), "exclude_tools": ["note"]}, [2, 5, 6, 7]),
    ({"trigger": {"type": "input_tokens", "value": 2000}}, [5, 6, 7]),
    ({"trigger": {"type": "input_tokens", "value": 20_000}}, [*range(8)]),
    ({}, [*range(8)]),  # the documented default of 100,000 tokens
    ({"trigger": uses(0), "clear_at_least": {"type": "input_tokens", "value": 1000}}, [5, 6, 7]),
    ({"trigger": uses(0), "clear_at_least": {"type": "input_tokens", "value": 9000}}, [*range(8)]),
]


@pytest.mark.parametrize(("edit", "left"), CASES, ids=str)
def test_old_tool_results_are_left_out(
    http: httpx.Client, engine: ScriptedEngine, edit: dict[str, Any], left: list[int]
) -> None:
    whole, _, before = asked(http, engine)
    prompt, applied, usage = asked(http, engine, {"type": TOOL_USES, **edit})
    assert decks_read(prompt) == left
    gone = [i for i in range(8) if i not in left]
    saved = before["input_tokens"] - usage["input_tokens"]
    expected = {"type": TOOL_USES, "cleared_tool_uses": len(gone), "cleared_input_tokens": saved}
    assert applied == ([expected] if gone else [])
    for i in gone:
        assert (
            f'[The result of {"note" if i % 3 == 2 else "read"} {{"deck": {i}}} was left out]'
            in prompt
        )
    # Calls keep their arguments, and nothing before the oldest cleared result changes.
    assert prompt.count("<tool_call>") == whole.count("<tool_call>") == 8
    first = whole.index(f"deck {gone[0]}: all dry") if gone else len(whole)
    assert prompt[:first] == whole[:first]


@pytest.mark.parametrize(("inputs", "left"), [(True, 3), (["note"], 7), ([], 8), (False, 8)])
def test_arguments_are_left_out_on_request(
    http: httpx.Client, engine: ScriptedEngine, inputs: Any, left: int
) -> None:
    edit = {"type": TOOL_USES, "trigger": uses(0), "clear_tool_inputs": inputs}
    prompt, _, _ = asked(http, engine, edit)
    assert (
        prompt.count('<tool_call>{"name": "read", "arguments": {"deck"')
        + prompt.count('<tool_call>{"name": "note", "arguments": {"deck"')
        == left
    )


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({}, 1),
        ({"keep": {"type": "thinking_turns", "value": 3}}, 3),
        ({"keep": "all"}, 8),
        ({"keep": {"type": "all"}}, 8),
    ],
)
def test_old_reasoning_is_left_out(
    http: httpx.Client, engine: ScriptedEngine, keep: dict[str, Any], left: int
) -> None:
    before = asked(http, engine)[2]
    prompt, applied, usage = asked(http, engine, {"type": THINKING, **keep})
    assert [f"thought {i}" in prompt for i in range(8)] == [i >= 8 - left for i in range(8)]
    saved = before["input_tokens"] - usage["input_tokens"]
    turns = {"type": THINKING, "cleared_thinking_turns": 8 - left, "cleared_input_tokens": saved}
    assert applied == ([turns] if left < 8 else [])


def test_streams_and_token_counts_report_the_same_edits(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    edits = ({"type": THINKING}, {"type": TOOL_USES, "trigger": uses(3)})
    _, applied, usage = asked(http, engine, *edits)
    assert [one["type"] for one in applied] == [THINKING, TOOL_USES]
    stream = http.post(MESSAGES, json=body(*edits, stream=True)).text
    data = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    (delta,) = [event for event in data if event["type"] == "message_delta"]
    assert delta["context_management"] == {"applied_edits": applied}
    counted = http.post(COUNT, json=body(*edits)).json()
    assert counted["input_tokens"] == usage["input_tokens"]
    original = counted["context_management"]["original_input_tokens"]
    assert original - usage["input_tokens"] == sum(one["cleared_input_tokens"] for one in applied)
    assert "context_management" not in http.post(COUNT, json=body()).json()
    assert "context_management" not in http.post(MESSAGES, json=body()).json()


def test_the_sdk_reads_the_applied_edits(http: httpx.Client) -> None:
    client = anthropic.Anthropic(base_url=str(http.base_url), api_key="none")
    sent = body({"type": TOOL_USES, "trigger": uses(3)})
    answer = client.beta.messages.create(model="m", betas=["context-management-2025-06-27"], **sent)
    assert answer.context_management is not None
    (applied,) = answer.context_management.applied_edits
    assert isinstance(applied, anthropic.types.beta.BetaClearToolUses20250919EditResponse)
    assert applied.cleared_tool_uses == 5


def test_a_wrong_edit_is_refused_with_its_place(http: httpx.Client) -> None:
    wrong = {"type": TOOL_USES, "trigger": {"type": "input_tokens", "value": -1}}
    reply = http.post(MESSAGES, json=body(wrong))
    assert (reply.status_code, "context_management.edits.0.trigger.value" in reply.text) == (
        400,
        True,
    )


def test_a_real_model_reads_only_what_changed(few_layers: Path) -> None:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=4096, n_seq_max=2)))
    edit = {"type": TOOL_USES, "trigger": uses(3)}
    with (
        running_server({"m": host}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as http,
    ):
        fresh = []
        for rounds in (6, 7, 8):
            usage = http.post(MESSAGES, json=body(edit, rounds=rounds, temperature=0)).json()[
                "usage"
            ]
            fresh.append(usage["input_tokens"])
            total = usage["input_tokens"] + usage["cache_read_input_tokens"]
        # New tokens start at the newly cleared result: they include the kept results, and no older
        # turn.
        assert fresh[-1] < 0.75 * total
        assert usage["cache_read_input_tokens"] > 300
