"""Apertus: a JSON array of `{"name": {arguments}}` between two control tokens."""

from __future__ import annotations

from typing import Any

from localllm import json_store
from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.readers import Call, as_json, read_block
from localllm.conversation.tools.schemas import array_of

_OPEN = "<|tools_prefix|>"
_CLOSE = "<|tools_suffix|>"


def _parse(block: str) -> list[Call] | None:
    items = json_store.parsed(block)
    if not isinstance(items, list):
        items = [items]
    calls: list[Call] = []
    for item in items:
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


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    return {_OPEN: GrammarTrigger("", array_of(tools, _call), _CLOSE)}


FORMATS = (
    ToolFormat(
        name="apertus",
        signs=(_OPEN,),
        markers=(_OPEN,),
        control=True,
        reader=read_block(_CLOSE, _parse),
        triggers=_triggers,
    ),
)
