"""Apertus: a JSON array of `{"name": {arguments}}` between two control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.schemas import array_of


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


def _call(name: str, schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


class Apertus(ToolFormat):
    name = "apertus"
    signs = ("<|tools_prefix|>",)
    markers = ("<|tools_prefix|>",)
    control = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return BlockReader(first, marker, "<|tools_suffix|>", _parse)

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {self.markers[0]: GrammarTrigger("", array_of(tools, _call), "<|tools_suffix|>")}


FORMATS = (Apertus(),)
