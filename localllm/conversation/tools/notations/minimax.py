"""MiniMax M2's tags and M1's JSON lines."""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.call_grammars import TagGrammar
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import JsonFormat
from localllm.conversation.tools.schemas import any_call
from localllm.conversation.tools.tag_reader import TaggedFormat, TagPatterns

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


class MiniMax(TaggedFormat):
    """M2: `<minimax:tool_call><invoke name="f"><parameter
    name="k">v</parameter></invoke></minimax:tool_call>`."""

    name = "minimax"
    signs = ("minimax:tool_call",)
    markers = ("<minimax:tool_call>",)
    calls_in_reasoning = True
    lead = "\n"
    one_block = True
    patterns = _PATTERNS
    grammar = _GRAMMAR


class MiniMaxM1(JsonFormat):
    """`<tool_calls>`, one call as JSON on each line, `</tool_calls>`."""

    name = "minimax_m1"
    signs = ("<beginning_of_sentence>ai name=",)
    markers = ("<tool_calls>",)
    closing = "</tool_calls>"

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        call = json_value(any_call(tools, "arguments"))
        return {
            "<tool_calls>": GrammarTrigger(
                "\n", ("lark", f'start: (call "\\n")+ "</tool_calls>"\ncall: {call}\n')
            )
        }


FORMATS = (MiniMax(), MiniMaxM1())
