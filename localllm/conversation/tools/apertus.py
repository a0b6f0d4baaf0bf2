"""Apertus: a JSON array of `{"name": {arguments}}` between two control tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.readers import BlockReader, Call, as_json


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


class Apertus(FreeFormat):
    """All calls in one JSON array."""

    name = "apertus"
    signs = ("<|tools_prefix|>",)
    markers = ("<|tools_prefix|>",)
    control = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the array up to its closing token."""
        return BlockReader(first, marker, "<|tools_suffix|>", _parse)


FORMAT = Apertus()
