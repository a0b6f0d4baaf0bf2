"""Functionary 3.1: `<function=name>{…}</function>`, the arguments as JSON."""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import JsonFormat


class Functionary(JsonFormat):
    name = "functionary"
    signs = ("<function=example_function_name>{",)
    markers = ("<function=",)
    head = re.compile(r"\s*([^>\s]+)>\s*(?=\{)")
    closing = "</function>"

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {
            "<function=": GrammarTrigger(
                "", json_calls(tools, lambda name: text(f"{name}>")), self.closing, again=True
            )
        }


FORMATS = (Functionary(),)
