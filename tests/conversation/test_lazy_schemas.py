"""Formats that write parameters one by one are only held by a grammar where the schema names them one by one: a grammar
that could not write what a tool asks for would force calls the tool refuses."""

from __future__ import annotations

from typing import Any

import pytest

from conversation.test_lazy_calls import ids_of, matcher
from localllm.conversation.tools import FORMATS
from localllm.conversation.tools.lazy import either, starts_of

ONE_BY_ONE = ("qwen_coder", "glm", "minimax", "lfm", "function_gemma", "gemma4")
OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a", "b"]},
    {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"a": {"type": "string"}}}}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"minProperties": 1}]},
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


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_a_schema_that_leaves_names_open_is_left_to_the_model(name: str, schema: dict[str, Any]) -> None:
    closed = tool(CLOSED[3])
    closed["function"]["name"] = "g"
    assert starts_of(style(name), "", [closed, tool(schema)]) == {}
    assert either(style(name), "", [tool(schema)], "{}", None) is None


@pytest.mark.parametrize("name", ONE_BY_ONE)
@pytest.mark.parametrize("schema", CLOSED, ids=str)
def test_a_schema_that_names_its_parameters_is_held(name: str, schema: dict[str, Any]) -> None:
    assert starts_of(style(name), "", [tool(schema)])


@pytest.mark.parametrize("schema", OPEN, ids=str)
def test_formats_in_json_hold_any_schema(schema: dict[str, Any]) -> None:
    for name in ("hermes", "llama3", "mistral", "phi", "harmony", "kimi", "deepseek"):
        assert starts_of(style(name), "", [tool(schema)]), name


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen_coder", "<function=f>\n<parameter=a>\n", "\n</parameter>\n</function>"),
        ("glm", "f\n<arg_key>a</arg_key>\n<arg_value>", "</arg_value>\n"),
        ("minimax", '<invoke name="f">\n<parameter name="a">', "</parameter>\n</invoke>\n"),
    ],
)
def test_a_constant_text_is_held_as_one(name: str, before: str, after: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "const": "yes"}}, "required": ["a"]}
    (start,) = starts_of(style(name), "", [tool(schema)]).values()
    state = matcher(start.grammar)
    said = before + "yes" + after
    assert state.validate_tokens(list(said.encode())) == len(said.encode())
    assert state.validate_tokens(list((before + "no").encode())) == len(before)


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        "point": {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "null"}}, "required": ["x"]},
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
def test_values_within_values_in_gemmas_notation(said: str, allowed: bool) -> None:
    for name, quote in (("function_gemma", "<escape>"), ("gemma4", '<|"|>')):
        (start,) = starts_of(style(name), "", [tool(NESTED)]).values()
        ids = ids_of("call:f" + said.replace("Q", quote))
        state = matcher(start.grammar)
        assert (state.validate_tokens(ids) == len(ids)) is allowed


@pytest.mark.parametrize(
    "described",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "object"},
        {"$ref": "#/$defs/no"},
        {"$ref": "#"},
        {"type": "array", "items": {"$ref": "#/properties/a"}},
        {"enum": [["list"]]},
        {"allOf": [{"type": "integer"}]},
    ],
    ids=str,
)
def test_values_gemmas_notation_has_no_rules_for_are_left_to_the_model(described: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": described}}
    for name in ("function_gemma", "gemma4"):
        assert starts_of(style(name), "", [tool(schema)]) == {}
