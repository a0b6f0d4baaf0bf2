"""Apertus: a JSON array of `{"name": {arguments}}` between two control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import Grammar, GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.schemas import moved
from localllm.grammars.json_lark import ANY_ORDER


def _parse(block: str) -> list[Call] | None:
    try:
        items = json.loads(block)
    except (ValueError, RecursionError):
        return None
    calls: list[Call] = []
    for item in items if isinstance(items, list) else [items]:
        if not isinstance(item, dict) or not all(isinstance(a, dict) for a in item.values()):
            return None
        calls += [(name, as_json(arguments)) for name, arguments in item.items()]
    return calls or None


class Apertus(ToolFormat):
    name = "apertus"
    signs = ("<|tools_prefix|>",)
    markers = ("<|tools_prefix|>",)
    control = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return BlockReader(first, marker, "<|tools_suffix|>", _parse)

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {self.markers[0]: GrammarTrigger("", _array(tools), "<|tools_suffix|>")}


def _array(tools: NamedSchemas) -> Grammar:
    definitions = moved(tools)
    calls = [
        {
            "type": "object",
            "properties": {name: {"$ref": f"#/$defs/{there}"}},
            "required": [name],
            "additionalProperties": False,
        }
        for (name, _), there in zip(tools, definitions, strict=True)
    ]
    schema = {
        ANY_ORDER: True,
        "type": "array",
        "items": {"anyOf": calls},
        "minItems": 1,
        "$defs": definitions,
    }
    return "json_schema", json.dumps(schema)


FORMATS = (Apertus(),)
