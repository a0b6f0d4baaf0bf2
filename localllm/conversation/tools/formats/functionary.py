"""Functionary 3.1: `<function=name>{…}</function>`, with JSON arguments."""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import json_block

_OPEN = "<function="
_CLOSE = "</function>"


def _before_arguments(name: str) -> str:
    return text(f"{name}>")


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    call = json_calls(tools, _before_arguments)
    return {_OPEN: GrammarTrigger("", call, _CLOSE, again=True)}


FORMATS = (
    ToolFormat(
        name="functionary",
        signs=("<function=example_function_name>{",),
        markers=(_OPEN,),
        reader=json_block(_CLOSE, re.compile(r"\s*([^>\s]+)>\s*(?=\{)")),
        triggers=_triggers,
    ),
)
