"""Qwen3-Coder and Nemotron: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, json_arguments
from localllm.conversation.tools.tagged import Tagged, in_tags, is_open, tagged_reader
from localllm.conversation.tools.values import JsonValues

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")
_END = "</function>"


def _parse(tools: Sequence[Tool], tagged: Tagged, block: str) -> list[Call] | None:
    calls = in_tags(block, tools, tagged)
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
    unsure = 1
    # The model forgets the outer tag at times.
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    closing: ClassVar[str] = "</tool_call>"
    tagged: ClassVar[Tagged] = Tagged(_FUNCTION, _END, _PARAMETER, "</parameter>", wrapped=True)
    tags: ClassVar[Tags] = Tags(
        head=lambda name: f"<function={name}>\n",
        before=lambda key, kind: f"<parameter={key}>\n",
        after="\n</parameter>\n",
        end=_END,
        values=partial(JsonValues, python=True),
    )
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to the closing tag of the one that opened it."""
        if marker == self.markers[0]:
            return tagged_reader(first, marker, self.closing, self.tagged, partial(_parse, tools, self.tagged))
        return BlockReader(
            first,
            marker,
            _END,
            lambda block: _parse(tools, self.tagged, marker + block + _END),
            tail=self.closing,
            is_open=lambda block: is_open(marker + block + _END, self.tagged),
        )

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other, with or without their outer tag: an offered name tells of it."""
        closing = f"\n{self.closing}"
        inner = replace(self.tags, head=lambda name: "")
        forgotten = {
            self.tags.head(tool[0])[:-1]: Start("\n", tagged_calls([tool], inner), closing, again=True)
            for tool in tools
        }
        return {self.markers[0]: Start("\n", tagged_calls(tools, self.tags), closing, again=True), **forgotten}


FORMAT = QwenCoder()
