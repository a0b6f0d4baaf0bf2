"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Also the default for models whose
template knows no tools (see `prompt.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import one_call


class Hermes(ToolFormat):
    name = "hermes"
    signs = ("<tool_call>",)
    ambiguity = 2
    markers = ("<tool_call>",)
    calls_in_reasoning = True
    opening = "<tool_call>\n"

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        return JsonReader(first, marker, JSON_HEAD, end="</tool_call>")

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {"<tool_call>": GrammarTrigger("\n", one_call(tools), "\n</tool_call>", again=True)}


FORMATS = (Hermes(),)
