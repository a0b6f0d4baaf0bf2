"""Muse Glimmer: messages with a recipient. `to=self` is reasoning, `to=user` the answer, `to=name`
contains calls in tags.

Only a message to a function is a call. The same tags in an answer or in reasoning are text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import (
    Grammar,
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.call_grammars import NAME, TagGrammar, tagged_calls
from localllm.conversation.tools.lark import spelled, text
from localllm.conversation.tools.readers import BlockReader, Call
from localllm.conversation.tools.tag_reader import TagPatterns, is_open, typed_calls

_HEADER = "<|start|>assistant"
_LINE = "\n"
_OPEN = "<atem:function_calls>"
_CLOSE = "</atem:function_calls>"
# The header of a message to a function. The prompt ends with the beginning of the first header.
_TO_A_FUNCTION = r"(?:\A|<\|start\|>assistant) to=(?!user<|self<)[^<\s]+<\|message\|>\s*"
_PATTERNS = TagPatterns(
    re.compile(r'(?:[^<]*<\|message\|>\s*<atem:function_calls>)?\s*<atem:invoke name="([^"]+)">'),
    "</atem:invoke>",
    re.compile(r'\s*<atem:parameter name="([^"]+)"[^>]*>'),
    "</atem:parameter>",
)
_GRAMMAR = TagGrammar(
    head=f'<atem:invoke name="{NAME}">\n',
    before=f'<atem:parameter name="{NAME}">',
    after="</atem:parameter>\n",
    end="</atem:invoke>\n",
)


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
    def parse(block: str) -> list[Call] | None:
        return typed_calls(block, tools, _PATTERNS)

    return BlockReader(first, marker, _CLOSE, parse, is_open=_ends_in_a_value)


def _ends_in_a_value(block: str) -> bool:
    return is_open(block, _PATTERNS)


def _calls(tools: NamedSchemas) -> Grammar:
    return tagged_calls(tools, _GRAMMAR, repeat=True, closing=_CLOSE)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """The calls of a message. The prompt already contains the beginning of the first header."""
    trigger = GrammarTrigger(_LINE, _calls(tools), again=True, preceded_by=_TO_A_FUNCTION)
    return {_OPEN: trigger}


def _unmarked_call(tools: NamedSchemas) -> str:
    calls = _calls(tools)[1].replace("start:", "calls:", 1)
    return f'" to=" /[^<\\s]{{1,64}}/ <|message|> {text(f"{_OPEN}{_LINE}")} calls\n{calls}'


def _framed(choices: str, answer: str) -> str:
    """An answer has a recipient too."""
    return f"start: {choices}\nanswer: {spelled(' to=user<|message|>')} {answer}\n"


FORMATS = (
    # Every message of a reply has a recipient.
    ToolFormat(
        name="muse",
        signs=(_OPEN,),
        markers=(f"{_HEADER} to=",),
        control=True,
        drops=(f"{_HEADER} to=user<|message|>", "<|eom|>", TurnEnd("<|eot|>")),
        think=(f"{_HEADER} to=self<|message|>", "<|eom|>"),
        header=_HEADER,
        reader=_reader,
        triggers=_triggers,
        unmarked_call=_unmarked_call,
        framed=_framed,
    ),
)
