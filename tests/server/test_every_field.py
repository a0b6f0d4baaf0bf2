"""Every field that a dialect knows, also a nested one, takes effect, is refused, or is named.

It is named in x-localllm-ignored. An unknown field is named there with its path, at any depth.

The bodies below have every nested field of every shape, which a test checks. Each value is
changed once. If the change is not refused and is visible neither in the engine's request nor in
the reply, the field must be named, or be one of the few that do not concern the answer.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from localllm.server.dialects.anthropic.messages import MessagesFields
from localllm.server.dialects.known import READS, REFUSED, Refused, Unused, shape_of
from localllm.server.dialects.llamacpp.completion import InfillFields, LlamaCppFields
from localllm.server.dialects.ollama.requests import OllamaChat, OllamaGenerate
from localllm.server.dialects.openai.chat import ChatFields
from localllm.server.dialects.openai.completions import CompletionFields
from localllm.server.dialects.responses.items import ResponsesFields
from localllm.server.models.router import ServedModel
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

PNG = "data:image/png;base64,aGk="
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
PARTS = [
    {
        "type": "text", "text": "seen", "cache_control": {}, "annotations": [], "logprobs": [],
        "detail": "low", "signature": "s", "data": "d",
    },
    {"type": "refusal", "refusal": "no"},
    {"type": "thinking", "thinking": "hm"},
    {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
    {"type": "image", "image": PNG},
    {"type": "image", "url": PNG},
    {"type": "input_audio", "input_audio": {"data": "aGk="}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,aGk="}},
    {"type": "video_url", "video_url": {"url": "x"}},
    {
        "type": "file",
        "file": {"filename": "f", "file_data": "YQ==", "file_id": "i", "file_url": "u"},
    },
    {"type": "input_file", "filename": "g", "file_data": "Yg==", "file_id": "j", "file_url": "v"},
]  # fmt: skip
FUNCTION = {"name": "look", "description": "d", "parameters": SCHEMA, "strict": True}
GRAMMAR = {"type": "grammar", "syntax": "regex", "definition": "a+"}
CUSTOM = {"name": "write", "description": "w", "format": {"type": "grammar", "grammar": GRAMMAR}}
FORM = {
    "type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True,
}  # fmt: skip
REASONING = {
    "effort": "low", "enabled": True, "max_tokens": 9, "exclude": True, "summary": "auto",
    "generate_summary": "concise",
}  # fmt: skip
SWITCH = {"type": "enabled", "budget_tokens": 8, "display": "omitted"}
LOOPS = {"max_pattern_size": 9, "min_pattern_size": 2, "min_count": 3}
FORCED = {
    "json": SCHEMA, "regex": "a", "choice": ["a"], "grammar": 'root ::= "a"', "json_object": True,
    "structural_tag": "t",
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": FUNCTION, "cache_control": {}},
    {"type": "custom", "custom": CUSTOM},
    {**FUNCTION, "type": "function", "name": "flat"},
    {"type": "custom", "name": "flat2", "format": GRAMMAR},
    {"type": "namespace", "name": "space", "tools": [{**FUNCTION, "type": "function"}]},
]
NAMED = {"type": "function", "function": {"name": "look"}}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
CHOICES = [
    {**NAMED, "namespace": "n"},
    {"type": "custom", "custom": {"name": "write"}},
    {"type": "function", "name": "look"},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    ALLOWED,
]
HISTORY = [
    {"role": "user", "name": "me", "content": PARTS, "images": [PNG], "annotations": [1]},
    {
        "role": "assistant", "content": "a", "refusal": "r", "audio": {"id": "x"},
        "reasoning_content": "thought",
        "tool_calls": [
            {
                "id": "1", "type": "function", "index": 0,
                "function": {"name": "look", "arguments": "{}", "index": 0},
            },
            {"id": "2", "type": "custom", "custom": {"name": "write", "input": "aa"}},
        ],
    },
    {"role": "assistant", "content": "", "function_call": {"name": "look", "arguments": "{}"}},
    {"role": "assistant", "content": "b", "reasoning": "other"},
    {"role": "assistant", "content": "c", "thinking": "third"},
    {"role": "tool", "tool_call_id": "1", "tool_name": "look", "content": "42"},
    {"role": "user", "content": "hi"},
]  # fmt: skip
CHAT = {
    "messages": HISTORY, "repetition_detection": LOOPS,
}  # fmt: skip
ITEMS = [
    {"type": "message", "role": "user", "id": "i", "status": "completed", "content": PARTS},
    {
        "type": "function_call", "call_id": "c", "name": "look", "namespace": "n",
        "arguments": "{}",
    },
    {"type": "custom_tool_call", "call_id": "d", "name": "write", "input": "aa"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "42"}]},
    {
        "type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}],
        "encrypted_content": "e",
    },
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "hi"},
]  # fmt: skip
BLOCKS = [
    {
        "type": "text", "text": "seen", "cache_control": {"type": "ephemeral", "ttl": "5m"}, "citations": [1],
        "context": "c", "signature": "s", "data": "d",
    },
    {"type": "thinking", "thinking": "hm"},
    {"type": "document", "title": "T", "source": {"type": "text", "data": "doc"}},
    {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
    {"type": "image", "source": {"type": "url", "url": PNG, "file_id": "f"}},
    {"type": "tool_reference", "tool_name": "look"},
    {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": "42"},
]  # fmt: skip
ANTHROPIC_TOOLS = [
    {"name": "look", "description": "d", "input_schema": SCHEMA, "strict": True, "type": "custom"},
    {"type": "text_editor_20250728", "name": "edit", "max_characters": 9, "cache_control": {}},
    {
        "type": "computer_20250124", "name": "computer", "display_width_px": 1,
        "display_height_px": 2, "display_number": 3,
    },
]  # fmt: skip
MESSAGES = {
    "max_tokens": 50, "system": [{"type": "text", "text": "sys"}], "repetition_detection": LOOPS,
    "messages": [
        {"role": "user", "content": BLOCKS},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {"q": "x"}}],
        },
        {"role": "user", "content": "hi"},
    ],
}  # fmt: skip
STREAM = {
    "stream": True,
    "stream_options": {
        "include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True,
    },
}  # fmt: skip
OPTIONS = {"options": {"thinking_budget": 5, "num_predict": 9, "repetition_detection": LOOPS}}
Bodies = list[dict[str, Any]]
USES = {"type": "tool_uses", "value": 2}
EDITS = [
    {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
    {
        "type": "clear_tool_uses_20250919", "trigger": USES, "keep": USES, "exclude_tools": ["a"],
        "clear_at_least": {"type": "input_tokens", "value": 9}, "clear_tool_inputs": ["b"],
    },
    {
        "type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 90_000},
        "pause_after_compaction": True, "instructions": "Write numbers only.",
    },
]  # fmt: skip
HI = {"messages": [{"role": "user", "content": "hi"}]}


def thinking(base: dict[str, Any]) -> Bodies:
    """Return bodies with one reasoning field each, so that the fields need not agree."""
    alone = [{"reasoning": {k: v}} for k, v in REASONING.items()]
    alone += [{"thinking": {"type": "enabled", k: v}} for k, v in SWITCH.items()]
    return [{**base, **one} for one in alone]


def with_tools(base: dict[str, Any]) -> Bodies:
    return [
        {**base, "tools": TOOLS},
        *({**base, "tools": _of(c), "tool_choice": c} for c in CHOICES),
    ]


def _of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """Return only the allowed tool for an `allowed_tools` choice, and otherwise the first two
    tools."""
    return TOOLS[:1] if choice["type"] == "allowed_tools" else TOOLS[:2]


BODIES: dict[str, tuple[type[BaseModel], Bodies]] = {
    "/v1/chat/completions": (
        ChatFields,
        [
            CHAT, {**HI, **STREAM}, *with_tools(HI), *thinking(HI),
            {**HI, "response_format": {"type": "json_schema", "json_schema": FORM}},
            {**HI, "response_format": FORM},
            {**HI, "prediction": {"type": "content", "content": PARTS[:1]}},
            *({**HI, "structured_outputs": {k: v}} for k, v in FORCED.items()),
        ],
    ),
    "/v1/completions": (
        CompletionFields,
        [{"prompt": "a", **STREAM, "repetition_detection": LOOPS, "response_format": FORM},
         {"prompt": "a", "lora": [{"id": 0, "scale": 0.0}]}],
    ),
    "/v1/responses": (
        ResponsesFields,
        [
            {"input": ITEMS}, *thinking({"input": "hi"}),
            {"input": "hi", **STREAM, "text": {"format": FORM, "verbosity": "low"}},
            *with_tools({"input": "hi"}),
        ],
    ),
    "/v1/messages": (
        MessagesFields,
        [
            MESSAGES, {**MESSAGES, "tools": ANTHROPIC_TOOLS}, *thinking({**HI, "max_tokens": 50}),
            {
                **HI, "max_tokens": 9, "tools": ANTHROPIC_TOOLS[:1],
                "tool_choice": {"type": "tool", "name": "look"},
            },
            {
                **HI, "max_tokens": 9000, "tools": ANTHROPIC_TOOLS[:1],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            },
            {**HI, "max_tokens": 9, "output_config": {"effort": "low", "format": FORM}},
            {**HI, "max_tokens": 9, "output_format": FORM},
            {**HI, "max_tokens": 9, "context_management": {"edits": EDITS}},
        ],
    ),
    "/api/chat": (
        OllamaChat,
        [
            {**CHAT, "stream": False, **OPTIONS},
            *({**b, "stream": False} for b in thinking(HI)),
            *({**b, "stream": False} for b in with_tools(HI)),
        ],
    ),
    "/api/generate": (OllamaGenerate, [{"prompt": "a", "stream": False, **OPTIONS}]),
    "/completion": (
        LlamaCppFields,
        [
            {"prompt": {"prompt_string": "a", "multimodal_data": []}, "repetition_detection": LOOPS},
        ],
    ),
    "/infill": (InfillFields, [{"input_prefix": "a", "input_extra": [{"filename": "f", "text": "t"}]}]),
}  # fmt: skip
# Fields whose contents belong to the client.
OPAQUE = {
    "parameters", "schema", "arguments", "input_schema", "input", "json",
    "input_audio", "audio_url", "video_url", "audio", "annotations", "multimodal_data",
}  # fmt: skip
# Fields that do not concern the answer: ids and markers that clients send back, and cache hints.
SAYS_NOTHING = {
    "id", "call_id", "tool_call_id", "tool_use_id", "status", "index", "signature", "data", "type",
    "cache_control", "ttl", "annotations", "logprobs", "display_number", "media_type",
    # the name of a schema, which OpenAI requires
    "response_format.name", "response_format.json_schema.name", "text.format.name",
    "output_config.format.name", "output_format.name",
    # a file that is sent with its content needs no address
    "file_id", "file_url",
    # edits have no effect on a short conversation without calls; the others are tested in
    # test_context_management.py and test_anthropic_compaction.py
    "keep.value", "trigger.value", "clear_at_least.value", "exclude_tools", "clear_tool_inputs",
    "pause_after_compaction", "instructions",
    # strict: calls are constrained whenever possible
    "strict",
    # a summary of every level is the complete reasoning
    "summary", "generate_summary",
    # named as messages.audio, messages.video and messages.thinking
    "input_audio", "audio_url", "video_url", "content.thinking",
}  # fmt: skip
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}[{{ m.role }} {{ m.name }} "
    "{{ m.reasoning_content }}]{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}[{{ reasoning_effort }}][assistant]{# <think> </think> #}"
)
SAID = (
    '<think>hm</think>Well.<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
    '<tool_call>\n{"name": "look", "arguments": {"q": "y"}}\n</tool_call>'
)
FRESH = re.compile(r'[0-9a-f]{24}|"(created|completed)(_at)?": ?("[^"]*"|\d+)|_duration": ?\d+')


def leaves(body: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all values in a body that are neither objects nor lists of objects."""
    inside = body.items() if isinstance(body, dict) else enumerate(body)
    for key, value in inside:
        here = (*path, key)
        nested = isinstance(value, dict) or (
            isinstance(value, list) and value and isinstance(value[0], dict)
        )
        if (key not in OPAQUE or not path) and nested:
            yield from leaves(value, here)
        else:
            yield here


def plain(path: tuple[str | int, ...]) -> str:
    return ".".join(key for key in path if isinstance(key, str))


def changed(body: Any, path: tuple[str | int, ...]) -> Any:
    made = copy.deepcopy(body)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    value = inner[path[-1]]
    inner[path[-1]] = OTHER.get(path[-1], _other(value))
    return made


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {"other": {"type": "string"}} if isinstance(value, dict) else None


# Alternative values for fields that accept only a few.
OTHER: Mapping[Any, Any] = {
    "effort": "high", "summary": "detailed", "generate_summary": "detailed",
    "display": "summarized", "mode": "required", "role": "system", "syntax": "lark",
    "file_data": "Yw==", "url": "data:image/png;base64,aGkh", "image": "data:image/png;base64,aGkh",
    "images": ["data:image/png;base64,aGkh"], "arguments": '{"q": 1}', "choice": ["b"],
    "grammar": 'root ::= "b"', "max_tokens": 7, "definition": "b+",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine([SAID], chat_template=TEMPLATE, vision=True, n_ctx=20_000)


@pytest.fixture(scope="module")
def http(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server([ServedModel("tiny", engine)]) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


def seen(
    http: httpx.Client, engine: ScriptedEngine, path: str, body: Any
) -> tuple[Any, httpx.Response]:
    engine.requests.clear()
    reply = http.post(path, json=body)
    said = reply.text
    if path == "/v1/responses" and "json" in reply.headers["content-type"]:
        # an echo does not count as an effect
        said = json.dumps(
            {k: v for k, v in reply.json().items() if k in ("output", "usage", "error")}
        )
    return [FRESH.sub("", said), [replace(r, id="") for r in engine.requests]], reply


def known(shape: Mapping[str, Any], path: str = "", above: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield the paths that a shape knows. A recursive shape is entered once."""
    for name, inner in shape.items():
        here = f"{path}.{name}" if path else name
        if isinstance(inner, Mapping):
            if id(inner) not in above:
                yield from known(inner, here, (*above, id(inner)))
        elif name != READS:
            yield here


CASES = [(path, i) for path, (_, bodies) in BODIES.items() for i in range(len(bodies))]


@pytest.mark.parametrize(("path", "i"), CASES)
def test_every_value_is_honoured_refused_or_named(
    http: httpx.Client, engine: ScriptedEngine, path: str, i: int
) -> None:
    body = BODIES[path][1][i]
    before, reply = seen(http, engine, path, body)
    assert reply.status_code in (200, 400), reply.text
    named = set(reply.headers.get("x-localllm-ignored", "").split(","))
    swallowed = []
    for place in leaves(body):
        spot, last = plain(place), place[-1]
        after, other = seen(http, engine, path, changed(body, place))
        assert other.status_code < 500, (spot, other.text)
        told = named | set(other.headers.get("x-localllm-ignored", "").split(","))
        silent = last in SAYS_NOTHING or any(
            spot.endswith(f".{s}") or spot == s for s in SAYS_NOTHING
        )
        if other.status_code == 200 and after == before and spot not in told and not silent:
            swallowed.append(spot)
    assert not swallowed


_KINDS = ("type", "mode", "syntax")
# The other fields show that the entry is a call, and many clients garble the type.
_SAID_ELSEWHERE = ("tool_calls.type",)


def _at(body: Any, place: tuple[str | int, ...]) -> Any:
    for key in place:
        body = body[key]
    return body


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_kind_is_refused_with_the_known_or_named(http: httpx.Client, path: str) -> None:
    """An unknown kind of a part, tool, choice, format or source is refused or named, at any
    depth."""
    for body in BODIES[path][1]:
        for place in leaves(body):
            spot, kind = plain(place), _at(body, place)
            if place[-1] not in _KINDS or spot.endswith(_SAID_ELSEWHERE):
                continue
            made = copy.deepcopy(body)
            _at(made, place[:-1])[place[-1]] = "zzz"
            reply = http.post(path, json=made)
            named = reply.headers.get("x-localllm-ignored", "").split(",")
            parts = spot.split(".")
            # or the whole entry is named: tools.zzz, or a tool by its name
            whole = {f"{parts[0]}.{word}" for word in ("zzz", _at(body, place[:-1]).get("name"))}
            if reply.status_code == 200:
                assert {spot, *whole} & {*named}, spot
            else:
                assert reply.status_code == 400, (spot, reply.text)
                refused = json.dumps(reply.json()["error"])
                told = rf"\b{kind}s?\b|not among the tools|send functions"
                assert re.search(told, refused), spot


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_named_at_any_depth(http: httpx.Client, path: str) -> None:
    for body in BODIES[path][1]:
        spots = {plain(place[:-1]): place[:-1] for place in leaves(body)}
        for spot, place in spots.items():
            made = copy.deepcopy(body)
            inner = made
            for key in place:
                inner = inner[key]
            inner |= {"zzz": 1, "": {"without": "a name"}}
            reply = http.post(path, json=made)
            if reply.status_code == 400:
                assert http.post(path, json=body).status_code == 400, (spot, reply.text)
                continue
            where = f"{spot}.zzz" if spot else "zzz"
            # or the whole object that contains the field is named
            parts = where.split(".")
            above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
            assert above & set(reply.headers["x-localllm-ignored"].split(",")), where


def test_the_bodies_have_every_nested_field() -> None:
    """The bodies contain every nested field, compared by its last name.

    Several dialects share their shapes. Samplers have a table of their own.
    """
    tried = {str(place[-1]) for _, bodies in BODIES.values() for b in bodies for place in leaves(b)}
    for kind, _ in BODIES.values():
        nested = {spot.rpartition(".")[2] for spot in known(shape_of(kind)) if "." in spot}
        assert nested - tried - {*ChatFields.model_fields, *REFUSED} == set()


def test_a_refusal_gives_its_reason() -> None:
    for kind, _ in BODIES.values():
        for fate in shape_of(kind).values():
            assert not isinstance(fate, Refused) or len(fate.reason) > 10
            assert not isinstance(fate, Unused) or isinstance(fate.off, tuple)
