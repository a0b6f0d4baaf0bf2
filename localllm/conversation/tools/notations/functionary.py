"""Functionary 3.1: `<function=name>{…}</function>`, the arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import JsonReader

_HEAD = re.compile(r"\s*([^>\s]+)>\s*(?=\{)")
_OPEN, _CLOSE = "<function=", "</function>"


class Functionary(ToolFormat):
    name = "functionary"
    signs = ("<function=example_function_name>{",)
    markers = (_OPEN,)

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        return JsonReader(first, marker, _HEAD, end=_CLOSE)

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {_OPEN: GrammarTrigger("", json_calls(tools, lambda name: text(f"{name}>")), _CLOSE, again=True)}


FORMATS = (Functionary(),)
