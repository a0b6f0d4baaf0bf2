"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since late 2025 `[TOOL_CALLS]name[ARGS]{…}`.

A grammar can't spell the control token [ARGS], so in the second form it takes over behind it: the name is the model's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import JSON_HEAD, JsonReader, Tool, ToolFormat

_HEAD = re.compile(JSON_HEAD.pattern + r"|[\s\]},]*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
    # The block has no closing marker: it lasts to the end of the reply.
    return JsonReader(first, marker, _HEAD, end="\0")


FORMAT = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    markers=("[TOOL_CALLS]",),
    reader=_reader,
    control=True,
    opening="[TOOL_CALLS]",
)
