"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Also the default
for models whose template knows no tools (see `prompt.py`)."""

from __future__ import annotations

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.readers import JsonFormat
from localllm.conversation.tools.schemas import one_call


class Hermes(JsonFormat):
    name = "hermes"
    signs = ("<tool_call>",)
    ambiguity = 2
    markers = ("<tool_call>",)
    calls_in_reasoning = True
    opening = "<tool_call>\n"
    closing = "</tool_call>"

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {"<tool_call>": GrammarTrigger("\n", one_call(tools), "\n</tool_call>", again=True)}


FORMATS = (Hermes(),)
