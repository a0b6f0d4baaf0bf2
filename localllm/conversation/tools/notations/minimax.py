"""MiniMax M2's tags and M1's JSON lines."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.call_grammars import TagGrammar, tagged_calls
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import JSON_HEAD, BlockReader, JsonReader
from localllm.conversation.tools.schemas import any_call
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_reader, typed_calls

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_PATTERNS = TagPatterns(
    re.compile(r'\s*<invoke name="?([^">]+)"?>'),
    "</invoke>",
    re.compile(r'\s*<parameter name="?([^">]+)"?>'),
    "</parameter>",
)
_GRAMMAR = TagGrammar(
    head=lambda name: f'<invoke name="{name}">\n',
    before=lambda key, kind: f'<parameter name="{key}">',
    after="</parameter>\n",
    end="</invoke>\n",
)


class MiniMax(ToolFormat):
    """M2: `<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

    name = "minimax"
    signs = ("minimax:tool_call",)
    markers = (_OPEN,)
    calls_in_reasoning = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return tagged_reader(first, marker, _CLOSE, _PATTERNS, lambda block: typed_calls(block, tools, _PATTERNS))

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {_OPEN: GrammarTrigger("\n", tagged_calls(tools, _GRAMMAR, repeat=True, closing=_CLOSE))}


class MiniMaxM1(ToolFormat):
    """`<tool_calls>`, one call as JSON on each line, `</tool_calls>`."""

    name = "minimax_m1"
    signs = ("<beginning_of_sentence>ai name=",)
    markers = ("<tool_calls>",)

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        return JsonReader(first, marker, JSON_HEAD, end="</tool_calls>")

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        call = json_value(any_call(tools, "arguments"))
        return {"<tool_calls>": GrammarTrigger("\n", ("lark", f'start: (call "\\n")+ "</tool_calls>"\ncall: {call}\n'))}


FORMATS = (MiniMax(), MiniMaxM1())
