"""Objects of a schema are closed unless the schema opens them; llguidance judges the instances."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import pytest

from grammars.byte_matcher import allows, of_schema
from localllm.grammars.closed_objects import with_closed_objects

A = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "type": "object"}
B = {"properties": {"b": {"type": "string"}}, "type": "object"}
NESTED = {"type": "object", "properties": {"inner": A, "list": {"type": "array", "items": B}}}
OPTIONAL = {"properties": {"x": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}}}
TREE = {
    "properties": {"n": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n"],
}
BASE = {"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}
ALIAS = {"properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}], "title": "X"}}, "$defs": {"A": A}}

CASES: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    # schema, allowed instances, refused instances
    (A, [{"a": 1}], [{"a": 1, "b": 2}, {}]),
    (NESTED, [{"inner": {"a": 1}}, {"list": [{"b": "x"}]}], [{"inner": {"a": 1, "z": 1}}]),
    (NESTED, [{"list": []}], [{"list": [{"c": "x"}]}]),
    ({**OPTIONAL, "$defs": {"A": A}}, [{"x": None}, {"x": {"a": 1}}], [{"x": {"a": 1, "b": 1}}]),
    (TREE, [{"n": 1, "kids": [{"n": 2}]}], [{"n": 1, "kids": [{"n": 2, "m": 3}]}]),
    (BASE, [{"a": 1}, {"a": 1, "b": "x"}], [{"a": 1, "c": 2}, {"b": "x"}]),
    (ALIAS, [{"x": {"a": 1}}], [{"x": {"a": 1, "c": 1}}]),
    ({"allOf": [A, B]}, [{"a": 1, "b": "x"}], [{"a": 1, "b": "x", "c": 1}]),
    ({**A, "anyOf": [B, {"required": ["a"]}]}, [{"a": 1, "b": "x"}], [{"a": 1, "c": "x"}]),
    ({"anyOf": [A, B]}, [{"a": 1}, {"b": "x"}], [{"b": "x", "c": 1}]),
    ({**A, "required": ["a", "z"]}, [{"a": 1, "z": [1]}], [{"a": 1}, {"a": 1, "z": 1, "y": 1}]),
    ({"type": "object", "properties": {}}, [{}], [{"a": 1}]),
    ({"patternProperties": {"^p": {}}, "type": "object"}, [{"p1": 1}], [{"q": 1}]),
    # The schema itself allows other properties, or it names none.
    ({**A, "additionalProperties": True}, [{"a": 1, "b": 2}], []),
    ({**A, "additionalProperties": {}}, [{"a": 1, "b": 2}], []),
    ({**A, "additionalProperties": {"type": "integer"}}, [{"a": 1, "b": 2}], [{"a": 1, "b": ""}]),
    ({"allOf": [{**A, "additionalProperties": True}, B]}, [{"a": 1, "c": 2}], []),
    ({"type": "object"}, [{"any": 1}, {}], [[]]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"k": 1}], [{"k": "x"}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=range(len(CASES)))
def test_only_named_members_are_allowed(
    schema: dict[str, Any], good: list[Any], bad: list[Any]
) -> None:
    before = copy.deepcopy(schema)
    converted = with_closed_objects(schema)
    matcher = of_schema(converted)
    assert schema == before, "the client's schema is shown to the model as it was sent"
    for instance in good:
        jsonschema.validate(instance, schema)
        assert allows(matcher, json.dumps(instance)), instance
    for instance in bad:
        assert not allows(matcher, json.dumps(instance)), instance
    assert with_closed_objects(converted) == converted


def test_a_recursive_object_is_not_changed() -> None:
    endless = {"properties": {"a": {}}, "$ref": "#"}
    assert with_closed_objects(endless) == endless
    wide = {
        "$defs": {"x": {"allOf": [{"$ref": "#/$defs/x"}] * 9}},
        "allOf": [B, {"$ref": "#/$defs/x"}],
    }
    assert with_closed_objects(wide) == wide


@pytest.mark.parametrize("junk", [True, 5, [], {"allOf": 5, "properties": 7}, {"allOf": [5, None]}])
def test_an_invalid_schema_is_not_changed(junk: Any) -> None:
    assert with_closed_objects(junk) == junk


def test_data_in_a_schema_is_not_a_schema() -> None:
    data = {"properties": {"a": 1}}
    schema = {"const": data, "default": data, "examples": [data], "enum": [data]}
    assert with_closed_objects(schema) == schema
