"""Muse Glimmer: messages with a recipient. `to=self` is reasoning, `to=user` the answer, `to=name` holds calls in tags.

Only a message to a function is a call: the same tags in an answer or a thought are words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.lark import spelled
from localllm.conversation.tools.readers import BlockReader, Call
from localllm.conversation.tools.tagged import in_tags

_HEADER = "<|start|>assistant"
_FUNCTIONS = re.compile(r"[^<]*<\|message\|>\s*<atem:function_calls>")
_INVOKE = re.compile(r'\s*<atem:invoke name="([^"]+)">')
_PARAMETER = re.compile(r'\s*<atem:parameter name="([^"]+)"[^>]*>')


class Muse(FreeFormat):
    """Everything a reply says has a recipient."""

    name = "muse"
    signs = ("<atem:function_calls>",)
    markers = (f"{_HEADER} to=",)
    control = True
    drops = (f"{_HEADER} to=user<|message|>", "<|eom|>", TurnEnd("<|eot|>"))
    think = (f"{_HEADER} to=self<|message|>", "<|eom|>")
    header = _HEADER

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the message up to its calls' closing tag."""

        def parse(block: str) -> list[Call] | None:
            head = _FUNCTIONS.match(block)
            if head is None:
                return None
            return in_tags(block[head.end() :], tools, (_INVOKE, "</atem:invoke>"), (_PARAMETER, "</atem:parameter>"))

        return BlockReader(first, marker, "</atem:function_calls>", parse)

    def framed(self, choices: str, answer: str) -> str:
        """An answer has a recipient too."""
        return f"start: {choices}\nanswer: {spelled(' to=user<|message|>')} {answer}\n"


FORMAT = Muse()
