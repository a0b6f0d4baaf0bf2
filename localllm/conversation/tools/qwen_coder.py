"""Qwen3-Coder and Nemotron: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, as_json, typed

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


class QwenCoder(ToolFormat):
    """One function with tagged parameters."""

    name = "qwen_coder"
    signs = ("<function=",)
    # The model forgets the outer tag at times.
    markers = ("<tool_call>", "<function=")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to the closing tag of the one that opened it."""
        if marker == "<tool_call>":
            return BlockReader(first, marker, "</tool_call>", partial(_parse, tools))
        return BlockReader(first, marker, "</function>", lambda block: _parse(tools, marker + block))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        lark = tagged_calls(
            tools,
            head=lambda name: f"<function={name}>\n",
            before=lambda key: f"<parameter={key}>\n",
            after="\n</parameter>\n",
            end="</function>",
        )
        return {"<tool_call>": Start("\n", lark, "\n</tool_call>", again=True)}


FORMAT = QwenCoder()
