"""MiniMax M2: `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader
from localllm.conversation.tools.tagged import Tagged, in_tags, tagged_reader

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGGED = Tagged(
    re.compile(r'\s*<invoke name="?([^">]+)"?>'),
    "</invoke>",
    re.compile(r'\s*<parameter name="?([^">]+)"?>'),
    "</parameter>",
)
_TAGS = Tags(
    head=lambda name: f'<invoke name="{name}">\n',
    before=lambda key, kind: f'<parameter name="{key}">',
    after="</parameter>\n",
    end="</invoke>\n",
)


class MiniMax(ToolFormat):
    """All calls in one block."""

    name = "minimax"
    signs = ("minimax:tool_call",)
    markers = (_OPEN,)
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""
        return tagged_reader(first, marker, _CLOSE, _TAGGED, lambda block: in_tags(block, tools, _TAGGED))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One block, which holds every call."""
        return {_OPEN: Start("\n", tagged_calls(tools, _TAGS, repeat=True, closing=_CLOSE))}


FORMAT = MiniMax()
