"""Functionary 3.1: `<function=name>{…}</function>`, the arguments as JSON."""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, ToolFormat
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import json_block

_OPEN = "<function="
_CLOSE = "</function>"


FORMATS = (
    ToolFormat(
        name="functionary",
        signs=("<function=example_function_name>{",),
        markers=(_OPEN,),
        reader=json_block(_CLOSE, re.compile(r"\s*([^>\s]+)>\s*(?=\{)")),
        triggers=lambda template, tools: {
            _OPEN: GrammarTrigger(
                "", json_calls(tools, lambda name: text(f"{name}>")), _CLOSE, again=True
            )
        },
    ),
)
