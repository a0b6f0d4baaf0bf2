"""A keyword of one tool's schema that no grammar can enforce is left out and named.

All other keywords are enforced as before.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from conversation.test_grammar_triggers import TOOLS, matcher
from localllm.conversation.template import ChatTemplate
from localllm.conversation.tools.prompt import Choice
from localllm.conversation.tools.schemas import constrainable
from localllm.errors import UnsupportedError
from localllm.server.generation.prompt import Prompt, ResponseOptions, build_prompt

HERMES = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson "
    "}}<tool_call>{% endif %}"
)
QWEN = HERMES + "{# <function= #}"
HARD: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "propertyNames": {
        "type": "object",
        "propertyNames": {"pattern": "^a"},
        "patternProperties": {"b": {}},
    },
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "not": {"not": {"type": "integer"}},
    "if": {"if": {"pattern": "a"}, "then": {"minLength": 1}},
    "oneOf": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
    "pattern": {"type": "string", "pattern": "^(?=a)b"},
    "$ref": {"$ref": "#/$defs/missing"},
    "type": {"type": "any"},
    "maximum": {"type": "integer", "minimum": -1e30, "maximum": -1e29},
    "minimum": {"type": "integer", "minimum": "many"},
}


def tool(described: dict[str, Any]) -> dict[str, Any]:
    properties = {"hard": described, "n": {"type": "integer", "maximum": 9}}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def built(template: str, tools: list[dict[str, Any]], **wishes: Any) -> Prompt:
    asked = [{"role": "user", "content": "Hello"}]
    return asyncio.run(
        build_prompt(ChatTemplate(template), asked, ResponseOptions(tools=tools, **wishes))
    )


@pytest.mark.parametrize("word", HARD)
@pytest.mark.parametrize("template", [HERMES, QWEN])
def test_an_unsupported_keyword_is_named_and_the_rest_is_enforced(template: str, word: str) -> None:
    prompt = built(template, [tool(HARD[word]), *TOOLS], choice=Choice("auto"))
    assert any(name.startswith("tools.f.") for name in prompt.ignored), prompt.ignored
    assert f"tools.f.{word}" in prompt.ignored
    start = prompt.answer.calls["<tool_call>"]
    if template == QWEN:
        said = "<function=f>\n<parameter=n>\n3\n</parameter>\n"
        wrong = "<function=f>\n<parameter=n>\n30"
        other = "<function=get_weather>\n</function>"
    else:
        said, wrong = '{"name": "f", "arguments": {"n": 3}', '{"name": "f", "arguments": {"n": 30'
        other = '{"name": "get_weather", "arguments": {"days'
    state = matcher(start.grammar)
    assert state.validate_tokens(list(said.encode())) == len(said)
    assert state.validate_tokens(list(wrong.encode())) == len(wrong) - 1
    assert state.validate_tokens(list(other.encode())) < len(other)  # the city is required


@pytest.mark.parametrize("word", HARD)
def test_a_required_call_is_enforced_without_the_unsupported_keyword(word: str) -> None:
    for tools in ([tool(HARD[word])], [tool(HARD[word]), *TOOLS]):
        prompt = built(HERMES, tools, choice=Choice("required"))
        assert prompt.ignored
        assert prompt.answer.grammar is not None
        matcher(prompt.answer.grammar)  # fails if it cannot be compiled


def test_a_schema_answer_or_a_call_is_enforced_without_the_unsupported_keyword() -> None:
    wanted = ("json_schema", json.dumps({"type": "boolean"}))
    prompt = built(HERMES, [tool(HARD["uniqueItems"])], choice=Choice("auto"), grammar=wanted)
    assert prompt.ignored == ("tools.f.uniqueItems",)
    assert prompt.answer.grammar is not None
    matcher(prompt.answer.grammar)


def test_schemas_that_can_be_enforced_are_not_changed() -> None:
    kept, left_out = constrainable(TOOLS)
    assert (kept, left_out) == (TOOLS, ())
    plain = tool(
        {
            "oneOf": [{"type": "string"}, {"type": "null"}],
            "uniqueItems": False,
            "format": "somebody's",
        }
    )
    assert constrainable([plain])[1] == ()


def test_a_strict_tool_is_enforced_completely_or_refused_with_the_keyword() -> None:
    strict = tool(HARD["contains"])
    strict["strict"] = True
    with pytest.raises(UnsupportedError, match="contains"):
        constrainable([strict])
    held = tool({"type": "string"})
    held["strict"] = True
    assert constrainable([held])[1] == ()


def test_the_model_is_shown_the_schema_as_it_was_sent() -> None:
    assert "uniqueItems" in built(HERMES, [tool(HARD["uniqueItems"])], choice=Choice("auto")).text


def test_a_tool_nested_too_deeply_leaves_the_other_tools_unchanged() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(2000):
        deep = {"type": "array", "items": deep}
    kept, left_out = constrainable([tool(deep), *TOOLS])
    assert kept[1:] == TOOLS
    assert left_out


def test_invalid_parameters_are_replaced_by_any_object() -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": ["a"]}}}
    assert constrainable([broken])[1] == ("tools.f.properties",)
