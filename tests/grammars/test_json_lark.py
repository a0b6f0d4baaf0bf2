"""JSON values as rules: members in any order where the model orders them, each once; numbers with
an end."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from conversation.test_grammar_triggers import FORMATS
from grammars.byte_matcher import allows, matcher_of, of_schema
from localllm.conversation.tools.base import GrammarTrigger
from localllm.errors import UnsupportedError
from localllm.grammars.json_schema import schemas_in

INNER = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["u", "v"]}},
    "required": ["y"],
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "number"},
        "b": {"$ref": "#/$defs/inner"},
        "c": {"type": "array", "items": INNER},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"inner": INNER},
}
MEMBERS = {
    "a": "1.5",
    "b": '{"x": 2, "y": "u"}',
    "c": '[{"x": 1, "y": "v"}, {"y": "u", "z": [true]}]',
}


def said(names: tuple[str, ...]) -> str:
    return "{" + ", ".join(f'"{name}": {MEMBERS[name]}' for name in names) + "}"


def test_members_come_in_any_order_each_once() -> None:
    free, ordered = of_schema(SCHEMA, any_order=True), of_schema(SCHEMA)
    for n in range(4):
        for names in itertools.permutations("abc", n):
            complete = {"a", "b"} <= set(names)
            assert allows(free, said(names)) == complete, names
            assert allows(ordered, said(names)) == (complete and list(names) == sorted(names)), (
                names
            )
    assert not allows(free, said(("a", "b", "a")))


@pytest.mark.parametrize(
    "style",
    [f for f in FORMATS if f.name in ("hermes", "harmony", "kimi", "phi", "functionary", "cohere")],
)
def test_calls_in_json_take_any_order(style: Any) -> None:
    """The name stands first, for readers stream the arguments."""
    trigger: GrammarTrigger = next(iter(style.triggers("", [("f", SCHEMA)]).values()))
    kind, source = trigger.grammar
    lark = schemas_in(source if kind == "lark" else f"start: %json {source}\n")
    assert "set_bit" in lark
    if style.name == "hermes":
        matcher = matcher_of(LLMatcher.grammar_from_lark(lark))
        for names in itertools.permutations("abc"):
            assert allows(matcher, f'{{"name": "f", "arguments": {said(names)}}}')
            assert not allows(matcher, f'{{"arguments": {said(names)}, "name": "f"}}')


def test_objects_of_several_parts_take_any_order() -> None:
    parts = {
        "type": "object",
        "properties": {"k": {"enum": ["p", "q"]}, "n": {"type": "integer"}},
        "required": ["k"],
        "oneOf": [
            {"properties": {"k": {"const": "p"}}, "required": ["n"]},
            {"properties": {"k": {"const": "q"}}},
        ],
        "patternProperties": {},
    }
    matcher = of_schema({k: v for k, v in parts.items() if v}, any_order=True)
    verdicts = {
        '{"n": 1, "k": "p"}': True,
        '{"k": "p"}': False,
        '{"k": "q", "n": 2}': True,
        '{"more": 1, "k": "q"}': True,
    }
    assert {text: allows(matcher, text) for text in verdicts} == verdicts


def test_names_like_a_pattern() -> None:
    schema = {
        "type": "object",
        "properties": {"x-a": {"type": "integer"}, "b": {"type": "null"}},
        "patternProperties": {
            "^x-": {"maximum": 3, "type": "integer"},
            "^y.*/z$": {"type": "boolean"},
        },
        "additionalProperties": False,
    }
    matcher = of_schema(schema, any_order=True)
    verdicts = {
        '{"x-b": 3, "b": null, "x-a": 2}': True, '{"x-a": 4}': False, '{"x-b": 4}': False,
        '{"y/z": true}': True,
        '{"b": 1}': False, '{"c": 1}': False, "{}": True, '{"x-b": 3, "x-b": 3}': True,
    }  # fmt: skip
    assert {text: allows(matcher, text) for text in verdicts} == verdicts


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"type": "number", "minimum": 0},
        {"type": "integer"},
        {},
        {"type": ["number", "null"]},
    ],
)
def test_no_number_goes_on_without_end(schema: dict[str, Any]) -> None:
    matcher = of_schema(
        {
            "type": "object",
            "properties": {"n": schema},
            "required": ["n"],
            "additionalProperties": False,
        }
    )
    for start in ('{"n": 1', '{"n": 0.'):
        state = matcher.deep_copy()
        text = list(start.encode())
        if state.try_consume_tokens(text) == len(text):
            assert 0 < state.try_consume_tokens([ord("3")] * 60) < 25
    assert allows(matcher, '{"n": 123456789}')


def test_an_enumeration_may_be_long() -> None:
    values = [f"value-{i:04d}" for i in range(3000)]
    matcher = of_schema(
        {"type": "object", "properties": {"v": {"enum": [*values, 2.0, None]}}, "required": ["v"]}
    )
    for value in (values[0], values[-1], 2, 2.0, None):
        assert allows(matcher, json.dumps({"v": value}))
        state = matcher.deep_copy()
        for byte in json.dumps({"v": value}).encode():
            assert state.compute_bitmask()
            assert state.consume_token(byte), state.get_error()
    assert not allows(matcher, '{"v": "value-9999"}')


FORMATS_NEARLY: dict[str, tuple[list[str], list[str]]] = {
    "regex": (["^[a-z]{3,16}$", "(?:a|b)*c?", r"\\d+"], ["*", "[a", "(", "a**b("]),
    "json-pointer": (["", "/a/b~1c"], ["a", "/a~2"]),
    "uri-reference": (["a/b?c=d#e", "https://e.x/%20", "", "mailto:a@b"], ["://", "a b", "%zz"]),
    "iri": (["http://é.x/"], ["é x"]),
    "idn-email": (["ü@é.x"], ["ü"]),
}


@pytest.mark.parametrize("kind", FORMATS_NEARLY)
def test_formats_of_the_specification_are_held(kind: str) -> None:
    matcher = of_schema({"type": "string", "format": kind})
    good, bad = FORMATS_NEARLY[kind]
    assert all(allows(matcher, json.dumps(text, ensure_ascii=False)) for text in good)
    assert not any(allows(matcher, json.dumps(text, ensure_ascii=False)) for text in bad)
    assert allows(of_schema({"type": "string", "format": "path"}), '"any text"')


def test_ids_and_measurements_of_others_fit() -> None:
    for value in (
        1311111111111111111,
        6.02214076e23,
        -1.602e-19,
        40.74844123456789,
        0.1,
        -0.0,
        1e300,
    ):
        assert allows(
            of_schema({"type": "array", "items": {"type": "number"}}), json.dumps([value])
        )


@pytest.mark.parametrize(
    "schema",
    [
        False, {"enum": []}, {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "array", "items": {"enum": []}, "minItems": 1}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "string", "pattern": "^a{9}$", "maxLength": 5}, {"$ref": "#/$defs/n", "$defs": {"n": {"not": {}}}},
    ],
)  # fmt: skip
def test_what_nothing_matches_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"Unsatisfiable|not supported|nothing matches"):
        of_schema(schema)
    beside = {
        "type": "object",
        "properties": {"dead": schema, "a": {"const": 1}},
        "additionalProperties": False,
    }
    if "$ref" not in json.dumps(schema):
        matcher = of_schema(beside, any_order=True)
        assert allows(matcher, '{"a": 1}')
        assert not allows(matcher, '{"dead": 1}')


def test_bounds_that_leave_one_number_and_indentation() -> None:
    one = of_schema(
        {
            "type": "object",
            "properties": {"v": {"type": "number", "minimum": 1, "maximum": 1}},
            "required": ["v"],
        }
    )
    assert allows(one, '{"v": 1}')
    assert not allows(one, '{"v": 2}')
    deep: Any = 1
    for _ in range(5):
        deep = {"a": [deep]}
    assert allows(of_schema({"type": "object"}), json.dumps(deep, indent=2))


def test_parts_of_one_object_come_in_any_order_together() -> None:
    """Named in one, like a pattern in another, of no type in a third."""
    schema = {
        "$defs": {
            "base": {
                "properties": {"t": {"type": "integer"}},
                "patternProperties": {"^x-": {"type": "string"}},
            }
        },
        "type": ["object", "null"],
        "allOf": [
            {"$ref": "#/$defs/base"},
            {"anyOf": [{"required": ["a"]}, {"required": ["t"], "type": "object"}]},
        ],
        "properties": {"a": {"type": "boolean"}, "x-b": {"maxLength": 1}},
        "patternProperties": {"^[^x].{1,300}": {"type": "null"}},
    }
    matcher, validator = of_schema(schema, any_order=True), jsonschema.Draft202012Validator(schema)
    parts = [
        '"a": true',
        '"t": 1',
        '"x-b": "q"',
        '"x-b": "qq"',
        '"x-c": "qq"',
        '"x-c": 1',
        '"zz": null',
        '"zz": 1',
    ]
    for text in [
        "null",
        "1",
        *(
            "{" + ", ".join(some) + "}"
            for n in (1, 2, 3)
            for some in itertools.permutations(parts, n)
        ),
    ]:
        try:
            value = json.loads(text, object_pairs_hook=_once)
        except KeyError:
            continue
        assert allows(matcher, text) == validator.is_valid(value), text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise KeyError
    return dict(pairs)
