"""MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import BlockReader, Call, Tool, ToolFormat, as_json, typed

_INVOKE = re.compile(r'<invoke name="?([^">]+)"?>(.*?)(?:</invoke>|\Z)', re.DOTALL)
_PARAMETER = re.compile(r'<parameter name="?([^">]+)"?>(.*?)(?:</parameter>|\Z)', re.DOTALL)


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    calls: list[Call] = []
    for name, body in _INVOKE.findall(block):
        values = {k: typed(v.strip("\n"), k, name, tools) for k, v in _PARAMETER.findall(body)}
        calls.append((name, as_json(values)))
    return calls or None


FORMAT = ToolFormat(
    name="minimax",
    signs=("<minimax:tool_call>", "minimax:tool_call"),
    markers=("<minimax:tool_call>",),
    reader=lambda first, marker, tools: BlockReader(first, marker, "</minimax:tool_call>", partial(_parse, tools)),
)
