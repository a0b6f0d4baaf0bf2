"""JSON schemas in llguidance: every allowed text matches the schema as sent."""

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
from localllm.grammars.closed_objects import with_closed_objects
from localllm.grammars.json_schema import convert_schema, loosened, schemas_in
from localllm.grammars.loosening import enforceable

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
    """Return a random nested schema, as authors write them."""
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
            {"not": inner()},
            {"oneOf": [inner(), inner()]},
            {"type": "object", "oneOf": [{"required": ["b"], **part()}, part()]},
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


def test_every_allowed_text_matches_the_schema() -> None:
    """Every allowed text matches the schema.

    If a schema is refused, its unsupported keywords are named, and the schema without them is
    accepted.
    """
    convert_schema = refused = right = narrow = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        schema = some_schema(rng, rng.choice([1, 2, 3]))
        try:
            matcher = of_schema(schema)
        except UnsupportedError:
            refused += 1
            rest, words = loosened(schema)
            # Closing objects can make alternatives disjoint.
            assert words or with_closed_objects(schema) != schema, schema
            of_schema(rest)
            continue
        convert_schema += 1
        validator = jsonschema.Draft201909Validator(schema)  # supports lists of items
        for value in some_values(rng):
            text = json.dumps(value)
            allowed, valid = allows(matcher, text), validator.is_valid(value)
            assert valid or not allowed, (seed, schema, text)
            right += valid and allowed
            narrow += valid and not allowed  # properties in another order
    assert 2 * convert_schema > refused, (convert_schema, refused)  # some of these allow no value
    assert right > 20 * narrow, (right, narrow)


SIGNS = '\\"\n\t\x01 a/}é['


def test_a_pattern_applies_to_the_value_and_not_to_its_json_escapes() -> None:
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


REFERRED = {"type": "array", "items": {"enum": [7]}, "maxItems": 1}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#here", "$defs": {"x": {"$anchor": "here", **REFERRED}}},
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
        {"allOf": [{"$ref": "#/allOf/1"}, REFERRED]},
    ],
)
def test_every_form_of_reference_is_resolved(schema: dict[str, Any]) -> None:
    matcher = of_schema(schema)
    assert [allows(matcher, text) for text in ("[]", "[7]", "[8]", "[7,7]", '"x"')] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_references_to_alternatives_with_different_tags_are_enforced() -> None:
    """References to alternatives that differ in a tag are enforced.

    pydantic writes unions in this form, with open objects.
    """

    def tagged(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"k": {"const": tag}}, "required": ["k"]}

    named = {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}]}
    matcher = of_schema({**named, "$defs": {"a": tagged("a"), "b": tagged("b")}})
    wanted = {'{"k": "a"}': True, '{"k": "b", "n": 1}': True, "null": True, '{"k": "c"}': False}
    assert {text: allows(matcher, text) for text in wanted} == wanted
    with pytest.raises(UnsupportedError, match="oneOf"):
        of_schema({**named, "$defs": {"a": tagged("a"), "b": tagged("a")}})


NO_SCHEMAS: tuple[Any, ...] = (None, 3, "text", [{"type": "string"}])


@pytest.mark.parametrize("nothing", NO_SCHEMAS, ids=str)
def test_an_invalid_property_schema_leaves_the_other_properties_enforced(nothing: Any) -> None:
    whole = {"type": "object", "properties": {"hard": nothing, "n": {"enum": [1]}}}
    kept, words = loosened(whole)
    assert words == ("schema",)
    assert allows(of_schema(kept), '{"n": 1}')
    assert not allows(of_schema(kept), '{"n": 2}')
    for word in ("items", "additionalProperties", "anyOf", "allOf", "$defs", "properties"):
        assert isinstance(loosened({word: nothing})[1], tuple)
        assert isinstance(loosened({"properties": {"a": {word: nothing}}})[1], tuple)


def test_a_set_is_treated_as_a_list_and_the_keyword_is_named() -> None:
    """A set is treated as a list, and the keyword is named.

    pydantic writes `set[int]` in this form. A grammar cannot compare items, but a program can.
    """
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    whole = {"type": "object", "properties": {"a": numbers}, "required": ["a"]}
    matcher = of_schema(whole)
    assert allows(matcher, '{"a": [1, 1]}')
    assert not allows(matcher, '{"a": ["x"]}')
    for kind in ("json_schema", "loose_schema"):
        grammar, named = enforceable((kind, json.dumps(whole)))
        assert grammar is not None
        assert (grammar[0], named) == ("json_schema", ("uniqueItems",))
    named_so = {"type": "object", "properties": {"uniqueItems": {"type": "integer"}}}
    assert enforceable(("json_schema", json.dumps(named_so)))[1] == ()
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}, "strict": True}
    kept, words = constrainable([tool])
    assert words == ("tools.f.uniqueItems",)
    assert kept[0]["function"]["parameters"]["properties"]["a"]["items"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("$ref", {"$ref": "https://e.x/elsewhere"}), ("$ref", {"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}),
        ("contains", {"contains": {"const": 1}}), ("not", {"not": {"type": "integer"}}),
        ("oneOf", {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}),
        ("pattern", {"pattern": "(?=a)b"}), ("divisibleBy", {"divisibleBy": 2}), ("type", {"type": "any"}),
        ("minimum", {"type": "integer", "minimum": 2**70}),
        ("unevaluatedProperties", {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}),
    ],
)  # fmt: skip
def test_an_unsupported_keyword_is_named_and_the_rest_of_the_schema_is_enforced(
    word: str, schema: dict[str, Any]
) -> None:
    whole = {
        "type": "object",
        "properties": {"hard": schema, "n": {"enum": [1]}},
        "required": ["n"],
    }
    with pytest.raises(UnsupportedError, match=word.replace("$", r"\$")):
        of_schema(whole)
    kept, words = loosened(whole)
    assert words == (word,)
    matcher = of_schema(kept)
    assert allows(matcher, '{"n": 1}')
    assert not allows(matcher, '{"n": 2}')
    grammar, named = enforceable(("loose_schema", json.dumps(whole)))
    assert grammar is not None
    assert (grammar[0], named) == ("json_schema", (word,))
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
    assert constrainable([tool])[1] == (f"tools.f.{word}",)
    with pytest.raises(UnsupportedError, match=word.replace("$", r"\$")):
        constrainable([{**tool, "strict": True}])


@pytest.mark.parametrize(
    "bounds",
    [(-(2**71), 2**71), (-1e300, 1e300), (-(2**63), 2**63 - 1), (0, 2**63 - 1), (-(2**80), 5)],
)
def test_bounds_beyond_64_bits_are_limited_to_representable_numbers(
    bounds: tuple[float, float],
) -> None:
    for word in ("integer", "number"):
        matcher = of_schema(
            convert_schema({"type": word, "minimum": bounds[0], "maximum": bounds[1]})
        )
        assert allows(matcher, "3")
        assert not allows(matcher, str(2**90))


def test_an_enumeration_may_be_long() -> None:
    values = [f"value-{i:04d}" for i in range(3000)]
    matcher = of_schema(
        {"type": "object", "properties": {"v": {"enum": [*values, 2, None]}}, "required": ["v"]}
    )
    for value in (values[0], values[-1], 2, None):
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
def test_string_formats_of_the_specification_are_enforced(kind: str) -> None:
    matcher = of_schema({"type": "string", "format": kind})
    good, bad = FORMATS_NEARLY[kind]
    assert all(allows(matcher, json.dumps(text, ensure_ascii=False)) for text in good)
    assert not any(allows(matcher, json.dumps(text, ensure_ascii=False)) for text in bad)
    assert allows(of_schema({"type": "string", "format": "path"}), '"any text"')


def test_large_ids_and_exponent_numbers_are_allowed() -> None:
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


def test_indented_json_is_allowed() -> None:
    deep: Any = 1
    for _ in range(5):
        deep = {"a": [deep]}
    assert allows(of_schema({"type": "object"}), json.dumps(deep, indent=2))


def test_a_schema_inside_a_grammar_is_converted_too() -> None:
    schema = {"type": "integer", "minimum": -(2**71)}
    said = schemas_in(f'start: "%json {{" /%json/ %json {json.dumps(schema)} // %json {{\n')
    assert str(2**71) not in said
    assert said.startswith('start: "%json {" /%json/ %json {')
    assert "// %json {\n" in said


def test_a_schema_nested_too_deeply_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(UnsupportedError, match="nested"):
        convert_schema(deep)
    assert loosened(deep) == (True, ("schema",))


def test_a_record_as_zod_prints_it_is_enforced() -> None:
    number = {"type": "number"}
    texts = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": number}
    matcher = of_schema(texts)
    assert allows(matcher, '{"any": 1}')
    assert not allows(matcher, '{"any": "x"}')
    names = {"type": "string", "enum": ["a", "b"]}
    listed = {"type": "object", "propertyNames": names, "additionalProperties": number}
    matcher = of_schema(listed)
    assert allows(matcher, '{"a": 1, "b": 2}')
    assert not allows(matcher, '{"c": 1}')
