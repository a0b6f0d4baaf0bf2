"""Calls that a model begins itself, constrained by the grammar of their opening.

Every text that this grammar allows is read as a call that its tool accepts. The grammar refuses
every call that the tool would refuse.
"""

from __future__ import annotations

import json
import random
import re
from functools import cache
from typing import Any

import llguidance
import pytest
from llguidance import LLMatcher, LLTokenizer

from localllm.conversation.reply import (
    CallArguments,
    CallStart,
    Content,
    ReasoningText,
    ReplyFormat,
)
from localllm.conversation.reply_parser import ReplyParser
from localllm.conversation.tools import FORMATS
from localllm.conversation.tools.base import GrammarTrigger, ToolFormat
from localllm.conversation.tools.constraints import answer_or_call, triggers_of
from localllm.grammars.json_schema import SPACE

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
                "$defs": {
                    "point": {
                        "type": "array",
                        "items": {"type": "boolean"},
                        "minItems": 2,
                        "maxItems": 2,
                    }
                },
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
# Texts of a template that select one of a format's variants.
SPELLINGS = {"mistral": ("", "[ARGS]"), "deepseek": ("", "```json"), "glm": ("", "</arg_key>\n")}


CASES = [
    pytest.param(f, template, triggers_of(f, template, TOOLS), id=f"{f.name} {template}".strip())
    for f in FORMATS
    for template in SPELLINGS.get(f.name, ("",))
]
# The text before an opening that is not a reply's first marker, and before an answer.
HEADERS = {
    "harmony": {" to=functions.": "<|start|>assistant"},
    "muse": {"<atem:function_calls>": "<|start|>assistant to=f<|message|>"},
}
FINAL = {"harmony": "<|channel|>final<|message|>", "muse": " to=user<|message|>"}
MARKER = 258
CONTROL = (
    "[MARK]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<start_function_call>",
    "<escape>",
    "<|tool_call>", '<|"|>', "<|open|>", "<|close|>", "<|sep|>",
)  # fmt: skip


class _Bytes:
    eos_token_id = 257
    bos_token_id = 256
    special_token_ids = tuple(range(256, MARKER + len(CONTROL)))
    tokens = (
        *(bytes([i]) for i in range(256)),
        b"\xff<s>",
        b"\xff</s>",
        *(b"\xff" + name.encode() for name in CONTROL),
    )

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZER = LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), eos_token=[257])


def ids_of(text: str) -> list[int]:
    """Return the ids of `text`, with control texts as control tokens."""
    ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, CONTROL)) + ")", text):
        ids += [MARKER + CONTROL.index(piece)] if piece in CONTROL else list(piece.encode())
    return ids


def text_of(ids: list[int]) -> str:
    return b"".join(_Bytes.tokens[i].removeprefix(b"\xff") for i in ids).decode()


@cache
def _compiled(grammar: tuple[str, str]) -> LLMatcher:
    kind, source = grammar
    if kind == "json_schema":
        compiled = LLMatcher.grammar_from_json_schema(
            source, defaults={"whitespace_pattern": SPACE}
        )
    else:
        compiled = LLMatcher.grammar_from_lark(source)
    found = LLMatcher(TOKENIZER, compiled, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def matcher(grammar: tuple[str, str]) -> LLMatcher:
    return _compiled(grammar).deep_copy()


def is_allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


@cache
def walk(grammar: tuple[str, str], seed: int) -> str:
    """Return a random text that the grammar allows.

    It has single characters where any text is allowed, and ends as soon as it can.
    """
    rng = random.Random(seed)
    state = matcher(grammar)
    said: list[int] = []
    texts_end = [
        json.loads(end).encode() for end in re.findall(r'suffix=("(?:[^"\\]|\\.)*")', grammar[1])
    ]
    ways_out = [*texts_end, b'"', b"}", b"]"]
    while not state.is_stopped() and len(said) < 4000:
        if state.is_accepting() and rng.random() < 0.7:
            break
        out = [list(w) for w in ways_out if state.validate_tokens(list(w)) == len(w)]
        mask = state.compute_bitmask()
        out += [[t] for t in range(MARKER, MARKER + len(CONTROL)) if is_allowed(mask, t)]
        if out and rng.random() < 0.5:
            step = rng.choice(out)
        else:
            allowed = [
                t
                for t in [*range(97, 123), *range(32, 127), 10, *range(128, 256)]
                if is_allowed(mask, t)
            ]
            assert allowed or out, text_of(said)
            step = [rng.choice(allowed)] if allowed else rng.choice(out)
        assert state.consume_tokens(step)
        said += step
    assert state.is_accepting(), text_of(said)
    return text_of(said)


def read(style: ToolFormat, pieces: list[str]) -> list[tuple[str, Any]]:
    """Return the calls in a reply. Fail if any part of it is shown as text."""
    reader = style.reader
    parser = ReplyParser(
        ReplyFormat(
            think=style.think,
            call_markers=style.markers,
            new_reader=lambda n, m: reader(n, m, TOOLS),
            drops=style.drops,
        )
    )
    calls: list[list[str]] = []
    for delta in [d for piece in pieces for d in parser.feed(piece)] + parser.close():
        assert not isinstance(delta, Content | ReasoningText), delta
        if isinstance(delta, CallStart):
            calls.append([delta.name, ""])
        elif isinstance(delta, CallArguments):
            calls[-1][1] += delta.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def check(name: str, arguments: Any) -> None:
    """Check a call against the rules of the tools, written in Python."""
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


@pytest.mark.parametrize(("style", "template", "starts"), CASES)
def test_every_text_that_the_grammar_allows_is_parsed_as_a_valid_call(
    style: ToolFormat, template: str, starts: dict[str, GrammarTrigger]
) -> None:
    seen = set()
    before = ""
    assert starts
    for opening, start in starts.items():
        for seed in range(15):
            text = opening + start.lead + walk(start.grammar, seed) + start.closing
            header = HEADERS.get(style.name, {}).get(opening, "")
            within = bool(before) and not header and not any(m in opening for m in style.markers)
            # an opening of further calls comes after a call
            reply = before + text if within else header + text
            calls = read(style, [reply])
            assert len(calls) > within, reply
            for call in calls:
                check(*call)
                seen.add(call[0])
            before = before or text
    assert seen == {"get_weather", "stop"}


@pytest.mark.parametrize(("style", "template", "starts"), CASES)
def test_a_constrained_call_is_parsed_alike_with_any_cut_of_its_stream(
    style: ToolFormat, template: str, starts: dict[str, GrammarTrigger]
) -> None:
    opening, start = next(iter(starts.items()))
    for seed in range(3):
        text = opening + start.lead + walk(start.grammar, seed) + start.closing
        text = HEADERS.get(style.name, {}).get(opening, "") + text
        whole = read(style, [text])
        assert read(style, list(text)) == whole
        for i in range(1, len(text)):
            assert read(style, [text[:i], text[i:]]) == whole, text[i:]


@pytest.mark.parametrize(("style", "template", "starts"), CASES)
def test_one_grammar_allows_a_schema_answer_or_a_call(
    style: ToolFormat, template: str, starts: dict[str, GrammarTrigger]
) -> None:
    answer = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    opening, start = next(iter(starts.items()))
    named = "<" in opening and style.control and style.name not in ("llama3", "phi")
    kinds: list[int | None] = [None] if style.name == "llama3" or named else [None, MARKER]
    for marker_id in kinds:
        lark = answer_or_call(style, template, TOOLS, json.dumps(answer), marker_id)
        if style.name == "mistral" and template:
            assert lark is None
            continue
        assert lark is not None
        state = matcher(("lark", lark))
        final = ids_of(FINAL.get(style.name, ""))
        if style.name == "harmony":
            thought = ids_of("<|channel|>analysis<|message|>So <|end|><|start|>assistant")
            assert state.validate_tokens(thought + final) == len(thought + final)
        assert state.validate_tokens([*final, *b'{"ok": true']) == len(final) + 11
        assert state.validate_tokens([*final, *b'{"ok": 1']) < len(final) + 8
        assert state.validate_tokens(list(b"Hello")) == 0
        head = (
            [marker_id]
            if marker_id is not None
            else ids_of(opening)
            if named
            else list(opening.encode())
        )
        header = HEADERS.get(style.name, {}).get(opening, "").removeprefix(style.header)
        text = [*ids_of(header), *head, *ids_of(start.lead + walk(start.grammar, 1))]
        if style.name == "llama3":
            text += b"}"
        assert state.validate_tokens(text) == len(text)


@pytest.mark.parametrize(("style", "template", "starts"), CASES)
def test_a_grammar_refuses_an_argument_that_the_schema_lacks(
    style: ToolFormat, template: str, starts: dict[str, GrammarTrigger]
) -> None:
    """The grammar accepts a call, but not the same call with a unit that the schema lacks."""
    for start in starts.values():
        if "unit" not in start.grammar[1]:
            continue  # the opening of the other tool
        said = next(
            s for seed in range(200) if (s := walk(start.grammar, seed)).count("unit") in (1, 2)
        )
        wrong = re.sub(
            r"(unit\W+(?:escape|arg_value|/arg_key|type|string|true|sep|\W)*)[CF]", r"\1K", said
        )
        assert wrong != said
        state = matcher(start.grammar)
        assert state.validate_tokens(ids_of(said)) == len(ids_of(said))
        assert state.validate_tokens(ids_of(wrong)) < len(ids_of(wrong)), wrong


# A text or null: the form of zod's nullish() and Pydantic's Optional[str].
@pytest.mark.parametrize(
    "kind", [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["string", "null"]}]
)
@pytest.mark.parametrize(
    ("name", "template", "written"),
    [
        ("qwen_coder", "", "<function=f>\n<parameter=old>\na heron\n</parameter>\n</function>"),
        ("glm", "", "f<arg_key>old</arg_key><arg_value>a heron</arg_value>"),
        (
            "glm",
            "<arg_key>{{ k }}</arg_key>\n",
            "f\n<arg_key>old</arg_key>\n<arg_value>a heron</arg_value>\n",
        ),
        ("minimax", "", '<invoke name="f">\n<parameter name="old">a heron</parameter>\n</invoke>'),
    ],
)
def test_text_that_may_be_null_is_written_without_quotes(
    name: str, template: str, written: str, kind: Any
) -> None:
    style = next(f for f in FORMATS if f.name == name)
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"old": kind}}},
    }
    start = next(iter(triggers_of(style, template, [tool]).values()))
    text = written.removeprefix(start.lead.lstrip("\n"))
    state = matcher(start.grammar)
    assert state.validate_tokens(ids_of(text)) == len(text), (start.lead, start.grammar)


def test_every_format_has_a_grammar_except_for_names_it_cannot_express() -> None:
    by_name = {f.name: f for f in FORMATS}
    for style in FORMATS:
        assert triggers_of(style, "", TOOLS)
        assert triggers_of(style, "", []) == {}
    # Names that the Python format and Gemma's format cannot express.
    odd = [{"type": "function", "function": {"name": "a(b", "parameters": {}}}]
    for name in ("lfm", "function_gemma", "gemma4"):
        assert triggers_of(by_name[name], "", odd) == {}
        assert answer_or_call(by_name[name], "", odd, "{}", None) is None


def test_parameters_named_like_python_keywords_are_parsed() -> None:
    style = next(f for f in FORMATS if f.name == "lfm")
    reply = (
        '<|tool_call_start|>[go-to(from="a\\/b", class=[true, null], '
        'to="\\ud83d\\ude00")]<|tool_call_end|>'
    )
    assert read(style, [reply]) == [("go-to", {"from": "a/b", "class": [True, None], "to": "😀"})]
