"""Calls with arguments of every shape, and the shapes that a template cannot write."""

from __future__ import annotations

from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "path": {"type": "string"},
    "n": {"type": "integer"},
    "x": {"type": "number"},
    "on": {"type": "boolean"},
    "no": {"type": ["string", "null"]},
    "opt": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "mode": {"enum": ["fast", "slow"]},
    "kind": {"$ref": "#/$defs/kind"},
    "items": {"type": "array", "items": {"type": "string"}},
    "opts": {"type": "object"},
    "deep": {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": {"type": "integer"}},
            "b": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "no": {"type": "null"}},
            },
        },
    },
}
PARAMETERS = {
    "type": "object",
    "properties": PROPERTIES,
    "$defs": {"kind": {"type": "string", "enum": ["one", "two"]}},
}


def tools(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return two tools that take `parameters`."""
    return [
        {
            "type": "function",
            "function": {"name": name, "description": "does it", "parameters": parameters},
        }
        for name in ("f", "get_weather")
    ]


TOOLS = tools(PARAMETERS)
# For templates that write schemas in their own syntax and support only types.
PLAIN_TOOLS = tools(
    {"type": "object", "properties": {k: PROPERTIES[k] for k in ("text", "path", "n", "x", "on")}}
)

_CODE = 'def f():\n    return "a"\n\n\tx = 1  # é東🎉 <b> & c'
SHAPES: dict[str, Calls] = {
    "text": [("f", {"text": "Paris"})],
    "lines and letters": [("f", {"text": _CODE, "path": "a b"})],
    "quotes": [("f", {"text": 'it\'s "so"', "path": "C:\\dir"})],
    "newlines at the edges": [("f", {"text": "\na\n"})],
    "empty text": [("f", {"text": ""})],
    "text like a number": [("f", {"text": "123", "path": "true"})],
    "other formats' tags": [("f", {"text": "<a></b> {} [] </think >"})],
    "integer": [("f", {"n": 3})],
    "big integer": [("f", {"n": 123456789012345678901})],
    "float": [("f", {"x": 1.5e-7})],
    "true": [("f", {"on": True})],
    "false among others": [("f", {"n": 1, "on": False, "mode": "fast"})],
    "null": [("f", {"no": None})],
    "null of an alternative": [("f", {"opt": None})],
    "nullable text": [("f", {"no": "a"})],
    "nullable text with quotes": [("f", {"opt": 'a "b"'})],
    "enumeration by reference": [("f", {"kind": "one"})],
    "list": [("f", {"items": ["a", 'b, "c"']})],
    "list with quotes": [("f", {"items": ["d'e"]})],
    "empty list": [("f", {"items": []})],
    "object": [("f", {"opts": {"k": [1, "a", {"z": "w"}], "t": True}})],
    "empty object": [("f", {"opts": {"e": {}}})],
    "null in an object": [("f", {"opts": {"k": None}})],
    "nested": [("f", {"deep": {"a": [1, 2], "b": {"on": True}}})],
    "nested null": [("f", {"deep": {"b": {"no": None}}})],
    "no arguments": [("f", {})],
    "two calls": [("f", {"text": "a"}), ("get_weather", {"n": 1})],
    "two of one": [("f", {}), ("f", {"items": ["x"]})],
}
TWO = ("two calls", "two of one")
