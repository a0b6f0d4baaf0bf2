"""Calls a model begins itself: whatever the grammar behind the opening allows reads back as a call that its tool
accepts; what the tool would refuse, the grammar refuses too."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer

from localllm.conversation.reply import CallArguments, CallStart, Content, ReplyFormat
from localllm.conversation.tools import FORMATS
from localllm.conversation.tools.base import ToolFormat
from localllm.conversation.tools.lazy import _SPACE, Start, either, starts_of

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["C", "F"]},
                    "where": {"$ref": "#/$defs/point"},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
                "$defs": {"point": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "stop",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
CASES = [(f, starts) for f in FORMATS if (starts := starts_of(f, "", TOOLS))]
MARKER = 258


class _Bytes:
    eos_token_id = 257
    bos_token_id = 256
    special_token_ids = (256, 257, MARKER)
    tokens = (*(bytes([i]) for i in range(256)), b"\xff<s>", b"\xff</s>", b"\xff[MARK]")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), eos_token=[257])


def matcher(grammar: tuple[str, str]) -> LLMatcher:
    kind, source = grammar
    if kind == "json_schema":
        compiled = LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": _SPACE})
    else:
        compiled = LLMatcher.grammar_from_lark(source)
    found = LLMatcher(TOKENIZER, compiled, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def walk(grammar: tuple[str, str], rng: random.Random) -> str:
    """Some text the grammar allows: single letters where anything goes, and the way out where there is one."""
    state = matcher(grammar)
    said: list[int] = []
    ways_out = [b"\n</parameter>\n", b"</parameter>\n", b"</arg_value>\n", b'"', b"}", b"]"]
    while not state.is_stopped() and len(said) < 4000:
        if state.is_accepting() and rng.random() < 0.7:
            break
        out = [w for w in ways_out if state.validate_tokens(list(w)) == len(w)]
        if out and rng.random() < 0.5:
            step = list(rng.choice(out))
        else:
            allowed = [t for t in [*range(97, 123), *range(32, 97), 10, 123, 125] if state.validate_tokens([t])]
            assert allowed, bytes(said)
            step = [rng.choice(allowed)]
        assert state.consume_tokens(step)
        said += step
    assert state.is_accepting(), bytes(said)
    return bytes(said).decode()


def read(style: ToolFormat, text: str) -> list[tuple[str, Any]]:
    """The calls in a reply; fails where anything of it is shown as text."""
    reader = style.reader
    parser = ReplyFormat(call_markers=style.markers, new_reader=lambda n, m: reader(n, m, TOOLS)).parser()
    calls: list[list[str]] = []
    for delta in [*parser.feed(text), *parser.close()]:
        assert not isinstance(delta, Content), delta
        if isinstance(delta, CallStart):
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            calls[-1][1] += delta.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check(name: str, arguments: Any) -> None:
    """What the tools accept, in plain words."""
    if name == "stop":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert {"city", "unit"} <= set(arguments) <= {"city", "unit", "days", "where"}
    assert isinstance(arguments["city"], str)
    assert arguments["unit"] in ("C", "F")
    assert arguments.get("days", 1) in range(1, 15)
    where = arguments.get("where", [True, True])
    assert len(where) == 2
    assert all(isinstance(w, bool) for w in where)


@pytest.mark.parametrize(("style", "starts"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_whatever_the_grammar_allows_reads_back_as_a_valid_call(style: ToolFormat, starts: dict[str, Start]) -> None:
    seen = set()
    for opening, start in starts.items():
        for seed in range(15):
            text = opening + start.lead + walk(start.grammar, random.Random(seed)) + start.closing
            calls = read(style, text)
            assert calls, text
            for call in calls:
                check(*call)
                seen.add(call[0])
    assert seen == {"get_weather", "stop"}


@pytest.mark.parametrize(("style", "starts"), CASES, ids=lambda v: getattr(v, "name", ""))
def test_an_answer_in_a_schema_or_a_call(style: ToolFormat, starts: dict[str, Start]) -> None:
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    opening, start = next(iter(starts.items()))
    kinds: list[int | None] = [None] if style.name == "llama3" else [None, MARKER]
    for marker_id in kinds:
        lark = either(style, "", TOOLS, json.dumps(answer), marker_id)
        assert lark is not None
        state = matcher(("lark", lark))
        assert state.validate_tokens(list(b'{"ok": true')) == 11
        assert state.validate_tokens(list(b'{"ok": 1')) < 8
        assert state.validate_tokens(list(b"Hello")) == 0
        head = [marker_id] if marker_id is not None else list(opening.encode())
        text = [*head, *(start.lead + walk(start.grammar, random.Random(1))).encode()]
        if style.name == "llama3":
            text += b"}"
        assert state.validate_tokens(text) == len(text)


def test_formats_no_grammar_here_describes_are_left_to_the_reader() -> None:
    described = {f.name for f, _ in CASES}
    assert described == {"hermes", "llama3", "mistral", "phi", "qwen_coder", "glm", "minimax"}
    for style in FORMATS:
        if style.name not in described:
            assert either(style, "", TOOLS, "{}", None) is None
        assert starts_of(style, "", []) == {}
    mistral = next(f for f in FORMATS if f.name == "mistral")
    assert starts_of(mistral, "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", TOOLS) == {}
