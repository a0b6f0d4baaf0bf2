"""Codex's tools other than functions.

These are namespaces of functions, and custom tools that take text constrained by a grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.conversation.tools.regular import regular
from localllm.engine.worker.client import WorkerOptions
from localllm.engine.worker.supervisor import Supervisor
from localllm.server.models.router import ServedModel
from localllm_backends.contract import LoadSpec
from support.http_server import running_server
from support.scripted_engine import Gate, ScriptedEngine

RESPONSES = "/v1/responses"
LOOK = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
}
SERVER = {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [LOOK]}
AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [LOOK]}
GRAMMAR = """\
start: begin line+ end
begin: "*** Begin" LF
line: ("+" | "-") /(.*)/ LF -> line
end: "*** End" LF?
%import common.LF
"""
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
}
TEXT = '*** Begin\n+a "b" \\ ü\U0001f600\n-\tc\n*** End'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def answered(script: list[Any], **body: Any) -> tuple[ScriptedEngine, httpx.Response]:
    engine = ScriptedEngine(script)
    with running_server({"m": engine}) as server:
        reply = httpx.post(server.url + RESPONSES, json={"input": "Go.", **body}, trust_env=False)
    assert reply.status_code == 200, reply.text
    return engine, reply


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("tool", "flat"), [(SERVER, "mcp__notes__lookup"), (AGENTS, "agents__lookup")]
)
def test_a_namespace_is_part_of_the_name_for_the_model_and_separate_for_the_client(
    tool: dict[str, Any], flat: str
) -> None:
    engine, reply = answered([call(flat, '{"q": "x"}')], tools=[LOOK, tool])
    assert f'"{flat}"' in str(engine.requests[0].prompt)
    assert "x-localllm-ignored" not in reply.headers
    (item,) = reply.json()["output"]
    assert (item["namespace"], item["name"]) == (tool["name"], "lookup")
    assert json.loads(item["arguments"]) == {"q": "x"}


def test_a_plain_function_has_no_namespace() -> None:
    _, reply = answered([call("lookup", '{"q": "x"}')], tools=[LOOK, SERVER])
    assert "namespace" not in reply.json()["output"][0]


def test_a_call_of_a_namespace_comes_back_under_the_models_name_for_it() -> None:
    made = {
        "type": "function_call",
        "call_id": "c",
        "namespace": "agents",
        "name": "lookup",
        "arguments": "{}",
    }
    done = {"type": "function_call_output", "call_id": "c", "output": "42"}
    engine, _ = answered(
        ["ok"], tools=[AGENTS], input=[{"role": "user", "content": "Go."}, made, done]
    )
    prompt = str(engine.requests[0].prompt)
    assert '{"name": "agents__lookup"' in prompt
    assert "42" in prompt


@pytest.mark.parametrize("pieces", [1, 3, 1000])
def test_a_custom_call_streams_its_text(pieces: int) -> None:
    written = call("patch", json.dumps({"input": TEXT}))
    size = max(1, len(written) // pieces)
    script = [written[i : i + size] for i in range(0, len(written), size)]
    _, reply = answered(script, tools=[PATCH], stream=True)
    said = events(reply)
    added = next(e["item"] for e in said if e["type"] == "response.output_item.added")
    assert (added["type"], added["name"], added["input"]) == ("custom_tool_call", "patch", "")
    deltas = [e for e in said if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(e["delta"] for e in deltas) == TEXT
    assert {e["item_id"] for e in deltas} == {added["id"]}
    (done,) = [e for e in said if e["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == TEXT
    (item,) = said[-1]["response"]["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", TEXT, "completed")


def test_a_custom_call_and_its_output_in_the_history() -> None:
    made = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": TEXT}
    done = {"type": "custom_tool_call_output", "call_id": "c", "output": "Done!"}
    engine, _ = answered(
        ["ok"], tools=[PATCH], input=[{"role": "user", "content": "Go."}, made, done]
    )
    prompt = str(engine.requests[0].prompt)
    assert json.dumps(TEXT, ensure_ascii=False) in prompt
    assert "Done!" in prompt


def test_the_model_reads_the_grammar_and_the_engine_holds_it() -> None:
    engine, reply = answered([call("patch", json.dumps({"input": TEXT}))], tools=[PATCH])
    assert "x-localllm-ignored" not in reply.headers
    prompt = str(engine.requests[0].prompt)
    assert json.dumps(GRAMMAR.strip())[1:-1] in prompt
    assert "pattern" not in prompt
    (request,) = engine.requests
    assert request.constraint is not None
    held = [trigger.grammar[1] for trigger in request.constraint.triggers.values()]
    assert [("pattern" in grammar, "*** Begin" in grammar) for grammar in held] == [(True, False)]


def test_a_grammar_that_no_pattern_can_hold_is_named() -> None:
    nested = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    _, reply = answered([call("patch", '{"input": "(x)"}')], tools=[{**PATCH, "format": nested}])
    assert reply.headers["x-localllm-ignored"] == "tools.patch.format"
    assert reply.json()["output"][0]["input"] == "(x)"


@pytest.mark.parametrize(
    ("lark", "yes", "no"),
    [
        (GRAMMAR, "*** Begin\n+x\n-y\n*** End", "*** Begin\n*** End"),
        ('start: WORD ("," WORD)*\n%import common (WORD, LF)', "a,b", "a,"),
        ('start: a~2..3\na: "x"i | /[0-9]/', "xX1", "x"),
        ("start: [A] B?\nA: /a+/i // a comment\nB: \"b\\n\"", "AAb\n", "c"),
        ('?start: x\n     | "z"\n!x.2: "x" -> ex', "z", "y"),
    ],
)  # fmt: skip
def test_a_grammar_without_recursion_is_a_pattern(lark: str, yes: str, no: str) -> None:
    pattern = regular(lark)
    assert pattern is not None
    assert re.fullmatch(pattern, yes)
    assert not re.fullmatch(pattern, no)


@pytest.mark.parametrize("lark", ['start: start "a" | "b"', "%ignore WS\nstart: \"a\"", "start: "
                                                                                        "nobody", "start: \"a", ""])  # fmt: skip
def test_a_grammar_that_is_not_regular_has_no_pattern(lark: str) -> None:
    assert regular(lark) is None


def test_events_come_while_a_prompt_is_read_and_a_call_is_written() -> None:
    reading, writing = Gate(), Gate()
    block = (
        "<tool_call>\n<function=lookup>\n<parameter=q>\nx",
        "\n</parameter>\n</function>\n</tool_call>",
    )
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools "
        "%}<tool_call><function=…>{% endif %}"
    )
    engine = ScriptedEngine([reading, block[0], writing, block[1]], chat_template=template)
    body = {"input": "Go.", "tools": [LOOK], "stream": True}
    seen: list[dict[str, Any]] = []
    with (
        running_server({"m": engine}, keepalive_s=0.05, grace_s=0.01) as server,
        httpx.stream(
            "POST", server.url + RESPONSES, json=body, timeout=30, trust_env=False
        ) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: "):
                seen.append(json.loads(line[6:]))
                repeated = [e for e in seen if e["type"] == "response.in_progress"]
                if len(repeated) == 4:
                    reading.open()
                if len(repeated) == 8:
                    writing.open()
    assert [e["sequence_number"] for e in seen] == list(range(len(seen)))
    assert [e["type"] for e in seen].count("response.created") == 1
    assert seen[-1]["response"]["output"][0]["name"] == "lookup"


def test_events_come_while_a_model_loads() -> None:
    engine = ScriptedEngine(["ok"])
    engine.load_gate = Gate()
    kinds: list[str] = []
    with (
        running_server({"m": engine}, keepalive_s=0.05, grace_s=0.01) as server,
        httpx.stream(
            "POST",
            server.url + RESPONSES,
            json={"input": "Go.", "stream": True},
            timeout=30,
            trust_env=False,
        ) as reply,
    ):
        for line in reply.iter_lines():
            if line.startswith("data: "):
                kinds.append(json.loads(line[6:])["type"])
                if kinds.count("response.in_progress") == 2:
                    engine.load_gate.open()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"


@pytest.fixture(scope="module")
def http(few_layers: Path) -> Iterator[httpx.Client]:
    host = Supervisor(WorkerOptions(LoadSpec(path=str(few_layers), n_ctx=2048, n_seq_max=1)))
    with (
        running_server({"smollm2": host}) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"type": "grammar", "syntax": "regex", "definition": "[a-c]{3}"}, "[a-c]{3}"),
        (
            {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" LF '
                                                                '/[a-z]{1,5}/ '
                                                                'LF\n%import '
                                                                'common.LF'},
            r"\*\*\* Begin\n[a-z]{1,5}\n",
        ),
    ],
)  # fmt: skip
def test_a_real_model_is_held_to_the_grammar(
    http: httpx.Client, wanted: dict[str, Any], pattern: str
) -> None:
    body = {
        "input": "Write something.", "tools": [{**PATCH, "format": wanted}], "temperature": 0,
        "tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 60,
    }  # fmt: skip
    reply = http.post(RESPONSES, json=body)
    assert reply.status_code == 200, reply.text
    (item,) = reply.json()["output"]
    assert item["type"] == "custom_tool_call"
    assert re.fullmatch(pattern, item["input"]), item


def test_codex_finds_the_model_properties_that_it_reads() -> None:
    with running_server([ServedModel("m", ScriptedEngine(), n_ctx=2048)]) as server:
        (known,) = httpx.get(
            server.url + "/v1/models?client_version=0.169.0", trust_env=False
        ).json()["models"]
    assert (known["slug"], known["context_window"], known["input_modalities"]) == (
        "m",
        2048,
        ["text"],
    )
    assert "Patch. Lines without + must be in the file word for word." in known["base_instructions"]
    # Fields without a default in Codex 0.169, which rejects a list of models that lacks one.
    assert set(known) >= {
        "slug", "display_name", "supported_reasoning_levels", "shell_type", "visibility",
        "supported_in_api", "priority",
        "base_instructions", "support_verbosity", "truncation_policy",
        "supports_parallel_tool_calls",
        "experimental_supported_tools", "supports_reasoning_summaries",
    }  # fmt: skip
