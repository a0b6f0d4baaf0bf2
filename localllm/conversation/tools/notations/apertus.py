"""Apertus: a JSON array of `{"name": {arguments}}` between two control tokens."""

from __future__ import annotations

from typing import Any

from localllm import json_store
from localllm.conversation.tools.base import GrammarTrigger, ToolFormat
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.schemas import array_of

_OPEN = "<|tools_prefix|>"
_CLOSE = "<|tools_suffix|>"


def _parse(block: str) -> list[Call] | None:
    items = json_store.parsed(block)
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


FORMATS = (
    ToolFormat(
        name="apertus",
        signs=(_OPEN,),
        markers=(_OPEN,),
        control=True,
        reader=lambda first, marker, tools: BlockReader(first, marker, _CLOSE, _parse),
        triggers=lambda template, tools: {
            _OPEN: GrammarTrigger("", array_of(tools, _call), _CLOSE)
        },
    ),
)
