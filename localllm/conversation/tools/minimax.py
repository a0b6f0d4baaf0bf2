"""MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call
from localllm.conversation.tools.tagged import in_tags

_INVOKE = re.compile(r'\s*<invoke name="?([^">]+)"?>')
_PARAMETER = re.compile(r'\s*<parameter name="?([^">]+)"?>')


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    return in_tags(block, tools, (_INVOKE, "</invoke>"), (_PARAMETER, "</parameter>"))


class MiniMax(ToolFormat):
    """All calls in one block."""

    name = "minimax"
    signs = ("minimax:tool_call",)
    markers = ("<minimax:tool_call>",)
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""
        return BlockReader(first, marker, "</minimax:tool_call>", partial(_parse, tools))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One block, which holds every call."""
        lark = tagged_calls(
            tools,
            head=lambda name: f'<invoke name="{name}">\n',
            before=lambda key: f'<parameter name="{key}">',
            after="</parameter>\n",
            end="</invoke>\n",
            repeat=True,
        )
        return {"<minimax:tool_call>": Start("\n", lark, "</minimax:tool_call>")}


FORMAT = MiniMax()
