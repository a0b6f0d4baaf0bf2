"""Anthropic's dialect as Claude Code, pi, Cline and the SDKs use it.

Every field that they send reaches the model, and the answers have every field that they read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
LOOK = {
    "name": "look",
    "description": "Look it up.",
    "input_schema": {"type": "object", "properties": {}},
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
# Claude Code 2.1 reads the two token counts from an error to compute how much to compact.
CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine):
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@contextmanager
def _serving(model: Path) -> Iterator[httpx.Client]:
    supervisor = Supervisor(WorkerOptions(LoadSpec(path=str(model), n_ctx=1024, n_seq_max=2)))
    with (
        running_server({"smollm2": supervisor}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=120) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def smol(smollm2: Path):
    """A client of a server with the full SmolLM2, whose calls are sensible and therefore end."""
    with _serving(smollm2) as client:
        yield client


@pytest.fixture(scope="module")
def counting(few_layers: Path):
    """A client of a server with a model of few layers, for tests that only count tokens."""
    with _serving(few_layers) as client:
        yield client


def ask(http: httpx.Client, engine: ScriptedEngine, **body: Any) -> tuple[httpx.Response, Any]:
    """Return the reply and the engine's request."""
    engine.requests.clear()
    reply = http.post(MESSAGES, json={"messages": HI, "max_tokens": 50, **body})
    assert reply.status_code == 200, reply.text
    return reply, engine.requests[-1]


# --- the context ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": 32000}], ids=str)
def test_a_prompt_too_long_is_refused_with_the_text_that_clients_compact_on(
    counting: httpx.Client, stream: bool, limit
) -> None:
    long = [{"role": "user", "content": "word " * 1500}]
    counted = counting.post(COUNT, json={"messages": long}).json()["input_tokens"]
    reply = counting.post(MESSAGES, json={"messages": long, "stream": stream, **limit})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    found = CLAUDE_CODE.search(error["message"])
    assert found is not None, error
    assert (int(found[1]), int(found[2])) == (counted, 1024)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("most", "reason"),
    [
        (32000, "model_context_window_exceeded"),
        (None, "model_context_window_exceeded"),
        (3, "max_tokens"),
    ],
)
def test_a_full_context_and_a_token_limit_have_different_stop_reasons(
    counting: httpx.Client, stream: bool, most: int | None, reason: str
) -> None:
    long = [{"role": "user", "content": "word " * 960}]
    reply = counting.post(
        MESSAGES, json={"messages": long, "max_tokens": most, "ignore_eos": True, "stream": stream}
    )
    assert f'"stop_reason":"{reason}"' in reply.text.replace(" ", ""), reply.text[-300:]


# --- the conversation -----------------------------------------------------------------------------


def _with_result(**result: Any) -> list[dict[str, Any]]:
    return [
        *HI,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **result}]},
    ]


def test_a_failed_tool_result_is_marked_in_the_prompt(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    said = {}
    for failed in (True, False):
        messages = _with_result(content="no such file", is_error=failed)
        said[failed] = ask(http, engine, messages=messages, tools=[LOOK])[1].prompt
    assert "no such file" in said[True]
    assert said[True] != said[False]
    assert "[the tool failed]\nno such file" in said[True]


def test_a_failed_tool_result_without_text_is_marked_in_the_prompt_too(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    assert (
        "[the tool failed]"
        in ask(http, engine, messages=_with_result(is_error=True), tools=[LOOK])[1].prompt
    )


def test_an_image_in_a_tools_result_is_a_note_and_a_header(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    content = [{"type": "text", "text": "before"}, IMAGE, {"type": "text", "text": "after"}]
    reply, request = ask(http, engine, messages=_with_result(content=content), tools=[LOOK])
    assert re.search(r"before\n\[image omitted: [^]]+\]\nafter", request.prompt)
    assert reply.headers["x-localllm-ignored"] == "messages.images"


def test_an_image_in_the_history_does_not_end_the_session(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, IMAGE]}
    refused = http.post(MESSAGES, json={"messages": [asked], "max_tokens": 5})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "invalid_request_error"
    later = [
        asked,
        {"role": "assistant", "content": "?"},
        {"role": "user", "content": "Never mind."},
    ]
    reply, request = ask(http, engine, messages=later)
    assert "What is this?\n[image omitted" in request.prompt
    assert reply.headers["x-localllm-ignored"] == "messages.images"


def test_documents_of_text_are_read_and_others_named(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    parts = [
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "one"},
        },
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "two"}]},
        },
        {
            "type": "search_result",
            "source": "s",
            "title": "Found",
            "content": [{"type": "text", "text": "three"}],
        },
        {"type": "text", "text": "go on"},
    ]
    prompt = ask(http, engine, messages=[{"role": "user", "content": parts}])[1].prompt
    assert "Notes\none\ntwo\nFound\nthree\ngo on" in prompt
    pdf = {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="},
    }
    reply, request = ask(http, engine, messages=_with_result(content=[pdf]), tools=[LOOK])
    assert "[document omitted" in request.prompt
    assert reply.headers["x-localllm-ignored"] == "messages.documents"


def test_blocks_of_anthropics_server_tools_are_left_out_and_named(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "code_execution_tool_result", "tool_use_id": "s", "content": {}},
        {"type": "text", "text": "Found it."},
    ]
    messages = [*HI, {"role": "assistant", "content": said}, *HI]
    reply, request = ask(http, engine, messages=messages)
    assert "Found it." in request.prompt
    assert set(reply.headers["x-localllm-ignored"].split(",")) == {
        "messages.server_tool_use", "messages.web_search_tool_result",
        "messages.code_execution_tool_result",
    }  # fmt: skip


def test_a_foreign_compaction_block_and_tool_references_are_text(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    messages = [
        {"role": "assistant", "content": [{"type": "compaction", "content": "We spoke of birds."}]},
        *_with_result(content=[{"type": "tool_reference", "tool_name": "look"}]),
    ]
    prompt = ask(http, engine, messages=messages, tools=[LOOK])[1].prompt
    assert "We spoke of birds." in prompt
    assert "look" in prompt.rpartition("<tool_response>")[2]


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (
            {"context_management": {"edits": [{"type": "clear_everything"}]}},
            "context_management.clear_everything",
        ),
        (
            {"betas": ["x"], "metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast"},
            "",
        ),
        ({"cache_control": {"type": "ephemeral"}}, ""),
        ({"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]}, ""),
        ({"tools": [{**LOOK, "cache_control": {"type": "ephemeral"}, "strict": True}]}, ""),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            "output_config.effort,thinking.type",
        ),
    ],
    ids=lambda v: str(v)[:40],
)
def test_additional_fields_that_clients_send_are_accepted(
    http: httpx.Client, engine: ScriptedEngine, body: Any, named: str
) -> None:
    assert ask(http, engine, **body)[0].headers.get("x-localllm-ignored", "") == named


def test_samplers_of_the_other_dialects_are_honoured(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    sent = {
        "dry_multiplier": 0.8,
        "xtc_probability": 0.5,
        "min_p": 0.2,
        "repeat_penalty": 1.2,
        "seed": 4,
    }
    generation = ask(
        http, engine, **sent, min_tokens=3, stop_token_ids=[7], stop=["a"], stop_sequences=["b"]
    )[1].generation
    assert {name: getattr(generation.sampling, name) for name in sent} == sent
    assert (generation.min_tokens, generation.stop_token_ids, generation.stop[:2]) == (
        3,
        (7,),
        ("b", "a"),
    )


def test_several_choices_are_refused(http: httpx.Client) -> None:
    reply = http.post(MESSAGES, json={"messages": HI, "max_tokens": 5, "n": 2})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_count_tokens_counts_the_system_and_the_tools_and_names_what_it_ignores(
    http: httpx.Client,
) -> None:
    def counted(**more: Any) -> httpx.Response:
        reply = http.post(COUNT, json={"messages": HI, **more})
        assert reply.status_code == 200, reply.text
        return reply

    bare = counted().json()["input_tokens"]
    assert counted(system="x" * 100).json()["input_tokens"] >= bare + 100
    assert counted(tools=[{**LOOK, "description": "y" * 100}]).json()["input_tokens"] >= bare + 100
    assert counted(tools=[{"type": "bash_20250124", "name": "bash"}]).json()["input_tokens"] > bare
    named = counted(
        an_editors_own=1,
        thinking={"type": "adaptive"},
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
    assert set(named.headers["x-localllm-ignored"].split(",")) == {
        "an_editors_own", "tools.web_search", "thinking.type",
    }  # fmt: skip
    assert named.json()["input_tokens"] == bare


# --- tools that the client runs -------------------------------------------------------------------

CLIENT_TOOLS = [
    ({"type": "bash_20250124", "name": "bash"}, {"command": "ls"}, "restart"),
    ({"type": "bash_20241022", "name": "bash"}, {"command": "ls"}, "restart"),
    (
        {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            "max_characters": 900,
        },
        {"command": "insert", "path": "/a", "insert_line": 0, "insert_text": "x"},
        "insert_text",
    ),
    (
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"command": "undo_edit", "path": "/a"},
        "undo_edit",
    ),
    (
        {"type": "memory_20250818", "name": "memory"},
        {"command": "rename", "old_path": "/a", "new_path": "/b"},
        "old_path",
    ),
    (
        {
            "type": "computer_20250124",
            "name": "computer",
            "display_width_px": 1234,
            "display_height_px": 768,
        },
        {"action": "left_click", "coordinate": [3, 4]},
        "1234",
    ),
]


@pytest.mark.parametrize(
    ("tool", "given", "offered"),
    CLIENT_TOOLS,
    ids=lambda v: v.get("type", "") if isinstance(v, dict) else "",
)
def test_tools_that_the_client_runs_are_offered_and_called(
    http: httpx.Client,
    engine: ScriptedEngine,
    tool: dict[str, Any],
    given: dict[str, Any],
    offered: str,
) -> None:
    engine.script = [
        f"<tool_call>\n{json.dumps({'name': tool['name'], 'arguments': given})}\n</tool_call>"
    ]
    try:
        reply, request = ask(http, engine, tools=[tool], max_tokens=500)
    finally:
        engine.script = ("Hello",)
    assert offered in request.prompt
    assert "x-localllm-ignored" not in reply.headers
    said = reply.json()
    assert said["stop_reason"] == "tool_use"
    assert (said["content"][-1]["name"], said["content"][-1]["input"]) == (tool["name"], given)


@pytest.mark.parametrize("tool", ["bash_20250124", "text_editor_20250728", "memory_20250818"])
def test_a_forced_client_tool_fits_its_documented_parameters(smol: httpx.Client, tool: str) -> None:
    name = {"bash": "bash", "text": "str_replace_based_edit_tool", "memory": "memory"}[
        tool.split("_")[0]
    ]
    body = {
        "messages": [{"role": "user", "content": "List the files."}], "max_tokens": 200,
        "temperature": 0,
        "tools": [{"type": tool, "name": name}], "tool_choice": {"type": "tool", "name": name},
    }  # fmt: skip
    said = smol.post(MESSAGES, json=body).json()
    assert (said["content"][0]["type"], said["content"][0]["name"]) == ("tool_use", name)
    if said["stop_reason"] == "tool_use":
        assert isinstance(said["content"][0]["input"]["command"], str)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20260318", "name": "web_search"},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "browser_toolset_20260801"},
    ],
    ids=lambda t: t["type"],
)
def test_tools_of_anthropics_servers_are_left_out_by_name(
    http: httpx.Client, engine: ScriptedEngine, tool: dict[str, Any]
) -> None:
    reply, request = ask(http, engine, tools=[tool, LOOK])
    assert reply.headers["x-localllm-ignored"] == f"tools.{tool.get('name', tool['type'])}"
    assert "look" in request.prompt
    assert tool["type"] not in request.prompt


def test_a_left_out_tool_can_not_be_forced(http: httpx.Client) -> None:
    body = {
        "messages": HI, "max_tokens": 5,
        "tools": [{"type": "web_search_20250305", "name": "web_search"}, LOOK],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }  # fmt: skip
    reply = http.post(MESSAGES, json=body)
    assert reply.status_code == 400
    assert "web_search" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("choice", "offered", "parallel"),
    [
        ({"type": "auto"}, True, 2),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, 1),
        ({"type": "none"}, False, 0),
    ],
    ids=str,
)
def test_tool_choice_decides_offered_tools_and_parallel_calls(
    http: httpx.Client, engine: ScriptedEngine, choice: Any, offered: bool, parallel: int
) -> None:
    calls = [
        f'<tool_call>\n{{"name": "look", "arguments": {{"n": {n}}}}}\n</tool_call>\n'
        for n in (1, 2)
    ]
    engine.script = calls if offered else ("Hello",)
    tool = {**LOOK, "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    try:
        reply, request = ask(http, engine, tools=[tool], tool_choice=choice, max_tokens=500)
    finally:
        engine.script = ("Hello",)
    assert ("<tools>" in request.prompt) == offered
    assert sum(block["type"] == "tool_use" for block in reply.json()["content"]) == parallel


def test_tool_choice_any_forces_a_call_of_a_small_model(smol: httpx.Client) -> None:
    tool = {**LOOK, "input_schema": {"type": "object", "properties": {"q": {"enum": ["a", "b"]}},
        "required": ["q"],
                                     "additionalProperties": False}}  # fmt: skip
    body = {"messages": HI, "max_tokens": 60, "tools": [tool], "tool_choice": {"type": "any"}}
    said = smol.post(MESSAGES, json=body).json()
    assert said["stop_reason"] == "tool_use"
    assert said["content"][0]["input"]["q"] in ("a", "b")


def test_the_budget_of_a_thinking_model_ends_its_thinking() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    )
    engine = ScriptedEngine(["hm</think>", "done"], chat_template=template)
    with running_server({"tiny": engine}) as server:
        body = {
            "messages": HI,
            "max_tokens": 500,
            "thinking": {"type": "enabled", "budget_tokens": 7},
        }
        said = httpx.post(server.url + MESSAGES, json=body, trust_env=False).json()
    assert engine.requests[-1].thinking is not None
    assert engine.requests[-1].thinking.tokens == 7
    assert [block["type"] for block in said["content"]] == ["thinking", "text"]
