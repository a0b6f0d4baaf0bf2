"""JSON schemas in the engine's words: what is allowed matches the schema as it was sent, whatever
words it is in."""

from __future__ import annotations

import json
import os
import random
import re
from typing import Any

import jsonschema
import pytest

from grammars.byte_matcher import allows, of_schema
from localllm.conversation.tools.schemas import constrainable
from localllm.errors import UnsupportedError
from localllm.grammars.json_schema import enforceable, loosened, schemas_in, translated
from localllm.grammars.translator import LARGEST

SEEDS = int(os.environ.get("LOCALLLM_SCHEMAS", "120"))
NAMES = ("a", "b", "ab")
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    5,
    -3,
    2.5,
    "",
    "a",
    "ab",
    "b1",
    [],
    [1],
    ["a", 1],
    {},
    {"a": 1},
    {"b": "a"},
)


def some_schema(rng: random.Random, depth: int) -> Any:
    """A schema of the words that are said in others, as authors nest them."""
    plain: list[Any] = [
        {"type": rng.choice(["string", "integer", "number", "boolean", "null", "array", "object"])},
        {"type": ["string", "null"]},
        {"enum": rng.sample(VALUES[:12], 3)},
        {"const": rng.choice(VALUES[:12])},
        {"minimum": rng.choice([-1, 0, 2])},
        {"maxLength": rng.choice([0, 1, 2])},
        {"type": "string", "format": "somebody's own"},
        {"pattern": rng.choice(["^a", "b$", "^ab?$"])},
        True,
    ]
    if depth == 0:
        return rng.choice(plain)

    def inner() -> Any:
        return some_schema(rng, depth - 1)

    def part() -> Any:
        return {"properties": {rng.choice(NAMES): inner()}, "required": rng.sample(NAMES, 1)}

    anchor = f"x{rng.randrange(10**9)}"
    return rng.choice(
        [
            rng.choice(plain),
            {"type": "object", "not": {"required": rng.sample(NAMES, 2)}},
            {"not": inner()},
            {"oneOf": [inner(), inner()]},
            {"type": "object", "oneOf": [part(), part(), {"required": ["b"]}]},
            {"if": inner(), "then": inner(), "else": inner()},
            {"type": "object", "dependentRequired": {"a": ["b"]}, "properties": {"a": inner()}},
            {"type": "object", "dependentSchemas": {"a": part(), "b": {"required": ["a"]}}},
            {
                "type": "object",
                "propertyNames": {"enum": ["a", "b"]},
                "additionalProperties": inner(),
            },
            {"type": "object", "propertyNames": {"maxLength": 1}, "properties": {"ab": inner()}},
            {
                "type": "object",
                "patternProperties": {"^a$": inner(), "^(b|ab)$": inner()},
                "additionalProperties": False,
            },
            {"type": "object", "patternProperties": {"^a": inner(), "b$": inner()}},
            {
                "type": "object",
                "patternProperties": {"^a.": inner(), "^b": inner()},
                "additionalProperties": inner(),
            },
            {"type": "object", "properties": {"a": inner(), "b": inner()}, "minProperties": 1},
            {"type": "object", "required": ["a"], "additionalProperties": inner()},
            {"type": "array", "items": [inner(), inner()], "additionalItems": False},
            {"allOf": [inner(), {"anyOf": [inner(), inner()]}]},
            {"allOf": [rng.choice(plain), rng.choice(plain), rng.choice(plain)]},
            {"$ref": f"#{anchor}", "$defs": {"x": {"$anchor": anchor, "allOf": [inner()]}}},
            {"type": "array", "items": inner(), "uniqueItems": False, "maxItems": 2},
        ]
    )


def some_values(rng: random.Random) -> list[Any]:
    def value(depth: int) -> Any:
        kind = rng.random()
        if depth == 0 or kind < 0.5:
            return rng.choice(VALUES)
        if kind < 0.7:
            return [value(depth - 1) for _ in range(rng.randrange(3))]
        return {name: value(depth - 1) for name in rng.sample(NAMES, rng.randrange(4))}

    return [*VALUES, *(value(2) for _ in range(25))]


def test_what_is_allowed_matches_the_schema() -> None:
    held = refused = right = narrow = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        schema = some_schema(rng, rng.choice([1, 2, 3]))
        try:
            matcher = of_schema(schema, any_order=isinstance(schema, dict))
        except (UnsupportedError, AssertionError):
            refused += 1
            continue
        held += 1
        validator = jsonschema.Draft201909Validator(schema)  # which knows lists of items
        for value in some_values(rng):
            text = json.dumps(value)
            allowed, valid = allows(matcher, text), validator.is_valid(value)
            assert valid or not allowed, (seed, schema, text)
            right += valid and allowed
            narrow += valid and not allowed  # members in an order of their own
    assert held > 2 * refused, (held, refused)  # patterns that overlap are, on purpose
    assert right > 20 * narrow, (right, narrow)


SIGNS = '\\"\n\t\x01 a/}é['


def test_a_pattern_means_the_same_whatever_json_escapes() -> None:
    right = 0
    for seed in range(60):
        rng = random.Random(seed)
        some = "".join(re.escape(sign) for sign in rng.sample(SIGNS, rng.randrange(1, 5)))
        low, high = sorted(
            rng.sample(["\\x00", "\\x1f", " ", "!", "Z", "~"], 2),
            key=lambda sign: eval(f'"{sign}"'),
        )
        classes = [
            f"[^{some}]",
            f"[{some}]",
            f"[{low}-{high}]",
            f"[^{low}-{high}]",
            f"[^{low}-{high}{some}]",
            r"[^\\]",
            ".",
        ]
        pattern = f"^(?:{rng.choice(classes)}{rng.choice(['', '*', '+'])}{rng.choice(classes)})$"
        matcher = of_schema({"type": "string", "pattern": pattern})
        for _ in range(12):
            text = "".join(rng.choices(SIGNS, k=rng.randrange(4)))
            valid = re.fullmatch(pattern[1:-1], text) is not None
            assert allows(matcher, json.dumps(text, ensure_ascii=False)) == valid, (pattern, text)
            right += valid
    assert right > 100, right


def test_parts_that_lead_back_to_the_whole_end() -> None:
    part = {
        "type": "object",
        "properties": {"a": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}]}},
    }
    defs = {
        "x": part,
        "y": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}, "b": {"type": "null"}}},
    }
    matcher = of_schema({"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": defs})
    for text, right in (
        ('{"a": {"a": {"b": null}}}', True),
        ('{"a": {"a": {"b": 1}}}', False),
        ('{"a": 1}', False),
    ):
        assert allows(matcher, text) == right
    schema = {
        "$ref": "#/$defs/z",
        "$defs": {**defs, "z": {**part, "required": ["a"]}, "x": {"$ref": "#/$defs/z"}},
    }
    with pytest.raises(UnsupportedError, match="nothing matches"):
        of_schema(schema)


STATES = {"type": "string", "enum": [f"s{i}" for i in range(60)]}


def test_values_that_are_named_are_picked_and_cost_nothing() -> None:
    other = {"type": "string", "enum": [f"s{i}" for i in range(40, 90)]}
    schema = {
        "type": "array",
        "items": {"oneOf": [STATES, other, {"enum": ["s7", "z", 1, True]}, {"const": 1.0}]},
    }
    matcher = of_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for value in ("s1", "s7", "s45", "s89", "z", 1, True, "s90"):
        assert allows(matcher, json.dumps([value])) == validator.is_valid([value]), value


REFERRED = {"type": "array", "items": {"enum": [7]}, "maxItems": 1}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", **REFERRED}}},
        {"$ref": "#here", "definitions": {"x": {"$id": "#here", **REFERRED}}},
        {
            "id": "http://e.x/s#",
            "$ref": "http://e.x/s#/definitions/x",
            "definitions": {"x": REFERRED},
        },
        {
            "$id": "https://e.x/dir/s.json",
            "$ref": "other.json",
            "$defs": {"x": {"$id": "other.json", **REFERRED}},
        },
        {
            "$id": "https://e.x/s",
            "$ref": "t#/$defs/y",
            "$defs": {"x": {"$id": "t", "$defs": {"y": REFERRED}}},
        },
        {"$id": "urn:x:y", "$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": REFERRED}},
        {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/y"}, "y": REFERRED}},
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "$ref": "#/definitions/x",
            "maxItems": 0,
            "definitions": {"x": REFERRED},
        },
        {"allOf": [{"$ref": "#/allOf/1"}, REFERRED]},
    ],
)
def test_references_lead_where_the_author_means(schema: dict[str, Any]) -> None:
    matcher = of_schema(schema)
    assert [allows(matcher, text) for text in ("[]", "[7]", "[8]", "[7,7]", '"x"')] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("$ref", {"$ref": "https://e.x/elsewhere"}), ("$ref", {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}),
        ("contains", {"contains": {"const": 1}}), ("not", {"not": {"type": "integer"}}),
        ("oneOf", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}), ("uniqueItems", {"items": {"type": "integer"}, "uniqueItems": True}),
        ("pattern", {"pattern": "(?=a)b"}), ("divisibleBy", {"divisibleBy": 2}), ("type", {"type": "any"}),
        ("minimum", {"type": "integer", "minimum": 2**70}),
        ("unevaluatedProperties", {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}),
    ],
)  # fmt: skip
def test_what_cant_be_said_is_named_and_the_rest_is_held(word: str, schema: dict[str, Any]) -> None:
    whole = {
        "type": "object",
        "properties": {"hard": schema, "n": {"enum": [1]}},
        "required": ["n"],
    }
    with pytest.raises(UnsupportedError, match=word.replace("$", r"\$")):
        translated(whole)
    with pytest.raises(UnsupportedError, match=word.replace("$", r"\$")):
        schemas_in(f"start: %json {json.dumps(whole)}")
    kept, words = loosened(whole)
    assert words == (word,)
    matcher = of_schema(kept)
    assert allows(matcher, '{"n": 1}')
    assert not allows(matcher, '{"n": 2}')
    grammar, named = enforceable(("loose_schema", json.dumps(whole)))
    assert grammar is not None
    assert (grammar[0], named) == ("json_schema", (f"response_format.{word}",))
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
    assert constrainable([tool])[1] == (f"tools.f.{word}",)
    with pytest.raises(UnsupportedError, match=word.replace("$", r"\$")):
        constrainable([{**tool, "strict": True}])


@pytest.mark.parametrize(
    "bounds",
    [(-(2**71), 2**71), (-1e300, 1e300), (-(2**63), 2**63 - 1), (0, 2**63 - 1), (-(2**80), 5)],
)
def test_bounds_beyond_64_bits_are_those_of_what_can_be_written(
    bounds: tuple[float, float],
) -> None:
    for word in ("integer", "number"):
        matcher = of_schema(translated({"type": word, "minimum": bounds[0], "maximum": bounds[1]}))
        assert allows(matcher, "3")


def test_dependencies_of_older_drafts() -> None:
    named: Any = {"a": {}, "b": {}, "c": {}}
    schema = {
        "type": "object",
        "properties": named,
        "dependencies": {"a": ["b"], "b": {"properties": {"c": {"const": 1}}}},
    }
    matcher, validator = of_schema(schema), jsonschema.Draft7Validator(schema)
    for value in ({}, {"a": 1}, {"a": 1, "b": 1}, {"b": 1, "c": 1}, {"b": 1, "c": 2}, {"c": 2}):
        assert allows(matcher, json.dumps(value)) == validator.is_valid(value), value


def test_an_integer_has_an_end() -> None:
    matcher = of_schema(translated({"type": "array", "items": {"type": "integer", "minimum": 0}}))
    assert allows(matcher, f"[{LARGEST}]")
    assert not allows(matcher, f"[{LARGEST}0]")


def test_a_schema_in_a_grammar_goes_through_the_same_door() -> None:
    schema = {"type": "integer", "minimum": -(2**71), "not": {"const": 3}}
    said = schemas_in(f'start: "%json {{" /%json/ %json {json.dumps(schema)} // %json {{\n')
    assert str(2**71) not in said
    assert said.startswith('start: "%json {" /%json/ json0_')
    assert "// %json {\n" in said


def test_one_that_is_nested_without_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(UnsupportedError, match="nested"):
        translated(deep)
    assert loosened(deep) == (True, ("schema",))
