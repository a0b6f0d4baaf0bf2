"""Formats that write parameters one by one hold a call to its schema if it lists its properties.

If the schema leaves names open, the model chooses them. A grammar that could not write a tool's
required parameters would force calls that the tool refuses.
"""

from __future__ import annotations

from typing import Any

import pytest

from conversation.test_grammar_triggers import ids_of, matcher
from localllm.conversation.tools import FORMATS
from localllm.conversation.tools.constraints import triggers_of

ONE_BY_ONE = ("qwen_coder", "glm", "minimax", "lfm", "function_gemma", "gemma4")
OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"type": "object", "properties": {"a": {"type": "string"}}}},
    },
    {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "anyOf": [{"required": ["a"]}, {"minProperties": 1}],
    },
    {"type": "object", "properties": {}, "minProperties": 1},
]
CLOSED: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {}},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
]


def tool(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def style(name: str) -> Any:
    return next(f for f in FORMATS if f.name == name)


# One call of `f` with b = 1 and a = x, and the beginning of a call of `g` with b.
SAID = {
    "qwen_coder": ("<function=f>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n</parameter>\n</function>",
                   "<function=g>\n<parameter=b"),
    "glm": ("f\n<arg_key>b</arg_key>\n<arg_value>1</arg_value>\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
            "g\n<arg_key>b"),
    "minimax": ('<invoke name="f">\n<parameter name="b">1</parameter>\n<parameter name="a">x</parameter>\n</invoke>\n</minimax:tool_call>',
                '<invoke name="g">\n<parameter name="b'),
    "lfm": ('[f(b=1, a="x")]', "[g(b"),
    "function_gemma": ("call:f{b:1,a:<escape>x<escape>}", "call:g{b"),
    "gemma4": ('call:f{b:1,a:<|"|>x<|"|>}', "call:g{b"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_an_open_schema_is_not_constrained_and_the_other_tools_are(
    name: str, schema: dict[str, Any]
) -> None:
    closed = tool(CLOSED[3])
    closed["function"]["name"] = "g"
    start, *_ = triggers_of(style(name), "", [closed, tool(schema)]).values()
    allowed, refused = map(ids_of, SAID[name])
    state = matcher(start.grammar)
    assert state.validate_tokens(allowed) == len(allowed)
    assert state.validate_tokens(refused) == len(refused) - 1


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("schema", CLOSED, ids=str)
def test_a_schema_that_lists_its_parameters_is_enforced(name: str, schema: dict[str, Any]) -> None:
    assert triggers_of(style(name), "", [tool(schema)])


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_json_formats_enforce_any_schema(schema: dict[str, Any]) -> None:
    for name in ("hermes", "llama3", "mistral", "phi", "harmony", "kimi", "deepseek"):
        assert triggers_of(style(name), "", [tool(schema)]), name


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen_coder", "<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>"),
        ("glm", "f<arg_key>a</arg_key><arg_value>", "</arg_value>"),
        ("minimax", '<invoke name="f">\n<parameter name="a">', "</parameter>\n</invoke>\n"),
    ],
)
def test_a_constant_string_is_enforced(name: str, before: str, after: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "const": "yes"}},
        "required": ["a"],
    }
    start, *_ = triggers_of(style(name), "", [tool(schema)]).values()
    state = matcher(start.grammar)
    said = before + "yes" + after
    assert state.validate_tokens(list(said.encode())) == len(said.encode())
    assert state.validate_tokens(list((before + "no").encode())) == len(before)


TAGS = [
    ("qwen_coder", "<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>"),
    ("glm", "f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n"),
    ("minimax", '<invoke name="f">\n<parameter name="a">', "</parameter>\n</invoke>\n"),
]


def text_held_to(pattern: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": pattern}},
        "required": ["a"],
    }


@pytest.mark.parametrize(("name", "before", "after"), TAGS)
def test_the_pattern_of_a_string_is_enforced(name: str, before: str, after: str) -> None:
    start, *_ = triggers_of(style(name), "", [tool(text_held_to("^(?:a/b|\\+.*\\n)+$"))]).values()
    for value, taken in (
        ("+x <b>\n+\n", True),
        ("a/ba/b", True),
        ("a/b", True),
        ("-x\n", False),
        ("", False),
    ):
        said = (before + value + after).encode()
        assert (matcher(start.grammar).validate_tokens(list(said)) == len(said)) == taken, value


@pytest.mark.parametrize("pattern", ["a", "^a", "^a|b$", "^(?=a).$", "^(a)\\1$", "^(?!a)b$"])
@pytest.mark.parametrize(("name", "before", "after"), TAGS)
def test_a_pattern_that_cannot_be_enforced_leaves_the_string_unconstrained(
    name: str, before: str, after: str, pattern: str
) -> None:
    start, *_ = triggers_of(style(name), "", [tool(text_held_to(pattern))]).values()
    said = (before + "whatever" + after).encode()
    assert matcher(start.grammar).validate_tokens(list(said)) == len(said)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "null"}},
            "required": ["x"],
        },
        "either": {"anyOf": [{"enum": ["a", 1]}, {"type": "array", "items": {"type": "boolean"}}]},
    },
    "required": ["tags"],
}


@pytest.mark.parametrize(
    ("said", "allowed"),
    [
        ("{tags:[Qab,{}Q]}", True), ("{tags:[QaQ,QbQ]}", True), ("{tags:[QaQ,QbQ,QcQ]}", False), ("{tags:[]}", False),
        ("{}", False), ("{tags:QaQ}", False), ("{point:{x:1},tags:[QQ]}", True), ("{point:{x:1,y:null},tags:[QQ]}", True),
        ("{point:{y:null},tags:[QQ]}", False), ("{point:{x:QaQ},tags:[QQ]}", False), ("{either:QaQ,tags:[QQ]}", True),
        ("{either:1,tags:[QQ]}", True), ("{either:[],tags:[QQ]}", True), ("{either:[true,false],tags:[QQ]}", True),
        ("{either:2,tags:[QQ]}", False), ("{tags:[QQ],either:1}", False),
    ],
)  # fmt: skip
def test_nested_values_in_gemmas_format_are_enforced(said: str, allowed: bool) -> None:
    for name, quote in (("function_gemma", "<escape>"), ("gemma4", '<|"|>')):
        start, *_ = triggers_of(style(name), "", [tool(NESTED)]).values()
        ids = ids_of("call:f" + said.replace("Q", quote))
        state = matcher(start.grammar)
        assert (state.validate_tokens(ids) == len(ids)) is allowed


@pytest.mark.parametrize(
    ("described", "value"),
    [
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
        ({"type": "object"}, "{k:[QxQ,{m:null}]}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{k:1,m:2}"),
        ({"$ref": "#/$defs/no"}, "[QxQ]"),
        ({"$ref": "#"}, "{a:{a:{}}}"),
        ({"type": "array", "items": {"$ref": "#/properties/a"}}, "[[[]]]"),
        ({"enum": [["list"]]}, "[QlistQ]"),
        ({"allOf": [{"type": "integer"}]}, "1"),
    ],
    ids=str,
)
def test_values_without_rules_in_gemmas_format_are_not_constrained(
    described: dict[str, Any], value: str
) -> None:
    schema = {"type": "object", "properties": {"a": described, "b": {"type": "integer"}}}
    for name, quote in (("function_gemma", "<escape>"), ("gemma4", '<|"|>')):
        start, *_ = triggers_of(style(name), "", [tool(schema)]).values()
        ids = ids_of(f"call:f{{a:{value},b:2}}".replace("Q", quote))
        assert matcher(start.grammar).validate_tokens(ids) == len(ids)
        held = ids_of("call:f{b:x")
        assert matcher(start.grammar).validate_tokens(held) == len(held) - 1
