"""Qwen3-Coder and Nemotron: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import BlockReader, Call, Tool, ToolFormat, as_json, typed

_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    calls: list[Call] = []
    for function in _FUNCTION.finditer(block):
        name, body = function.groups()
        # One newline after the tag and one before its end belong to the format, not to the value.
        values = {
            key: typed(value.removeprefix("\n").removesuffix("\n"), key, name, tools)
            for key, value in _PARAMETER.findall(body)
        }
        calls.append((name, as_json(values)))
    return calls or None


FORMAT = ToolFormat(
    name="qwen_coder",
    signs=("<function=",),
    # The model forgets the outer tag at times.
    markers=("<tool_call>", "<function="),
    reader=lambda first, marker, tools: (
        BlockReader(first, marker, "</tool_call>", partial(_parse, tools))
        if marker == "<tool_call>"
        else BlockReader(first, marker, "</function>", lambda block: _parse(tools, "<function=" + block))
    ),
)
