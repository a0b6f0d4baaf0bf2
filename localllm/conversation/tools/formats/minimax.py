"""MiniMax M2's tags and M1's JSON lines."""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.call_grammars import NAME, TagGrammar
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import any_call
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format


def _triggers_m1(template: str, tools: NamedSchemas) -> Triggers:
    call = json_value(any_call(tools, "arguments"))
    lark = f'start: (call "\\n")+ "</tool_calls>"\ncall: {call}\n'
    return {"<tool_calls>": GrammarTrigger("\n", ("lark", lark))}


_M2_PATTERNS = TagPatterns(
    re.compile(r'\s*<invoke name="?([^">]+)"?>'),
    "</invoke>",
    re.compile(r'\s*<parameter name="?([^">]+)"?>'),
    "</parameter>",
)
_M2_GRAMMAR = TagGrammar(
    head=f'<invoke name="{NAME}">\n',
    before=f'<parameter name="{NAME}">',
    after="</parameter>\n",
    end="</invoke>\n",
)
FORMATS = (
    # M2: `<minimax:tool_call><invoke name="f"><parameter
    # name="k">v</parameter></invoke></minimax:tool_call>`.
    tagged_format(
        name="minimax",
        signs=("minimax:tool_call",),
        markers=("<minimax:tool_call>",),
        calls_in_reasoning=True,
        lead="\n",
        one_block=True,
        patterns=_M2_PATTERNS,
        grammar=_M2_GRAMMAR,
    ),
    # `<tool_calls>`, one call as JSON on each line, `</tool_calls>`.
    ToolFormat(
        name="minimax_m1",
        signs=("<beginning_of_sentence>ai name=",),
        markers=("<tool_calls>",),
        reader=json_block("</tool_calls>"),
        triggers=_triggers_m1,
    ),
)
