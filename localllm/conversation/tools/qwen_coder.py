"""Qwen3-Coder and Nemotron: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, json_arguments
from localllm.conversation.tools.tagged import in_tags

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")
_END = "</function>"


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    calls = in_tags(block, tools, (_FUNCTION, _END), (_PARAMETER, "</parameter>"))
    if calls is not None:
        return calls
    # Functionary's spelling, which small models mix in.
    head = _FUNCTION.match(block)
    if head is None:
        return None
    arguments = json_arguments(block[head.end() :].strip().removesuffix(_END))
    return None if arguments is None else [(head[1], arguments)]


class QwenCoder(ToolFormat):
    """One function with tagged parameters."""

    name = "qwen_coder"
    signs = ("<function=",)
    # The model forgets the outer tag at times.
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    closing: ClassVar[str] = "</tool_call>"
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to the closing tag of the one that opened it."""
        if marker == self.markers[0]:
            return BlockReader(first, marker, self.closing, partial(_parse, tools))
        return BlockReader(first, marker, _END, lambda block: _parse(tools, marker + block + _END), tail=self.closing)

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
