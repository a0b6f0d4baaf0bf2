"""Command R7B and later: sections between control tokens; calls are a JSON array with `tool_name` and `parameters`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.readers import JsonReader

_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_HEAD = re.compile(
    r'[\s\]},]*\[?\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"tool_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"parameters"\s*:\s*(?=\{)'
)


class Cohere(FreeFormat):
    """Everything a reply says stands in a section."""

    name = "cohere"
    signs = (_OPEN,)
    markers = (_OPEN,)
    control = True
    drops = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_THINKING|>")
    think = ("<|START_THINKING|>", "<|END_THINKING|>")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of one call after the other."""
        return JsonReader(first, marker, _HEAD, end=_CLOSE)


FORMAT = Cohere()
