"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Also the default for models whose
template knows no tools (see `prompt.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import one_call


class Hermes(ToolFormat):
    """One call as JSON between tags that are text."""

    name = "hermes"
    signs = ("<tool_call>",)
    unsure = 2
    markers = ("<tool_call>",)
    in_thought = True
    opening = "<tool_call>\n"

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of a JSON call."""
        return JsonReader(first, marker, JSON_HEAD, end="</tool_call>")

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        return {"<tool_call>": Start("\n", one_call(tools), "\n</tool_call>", again=True)}


FORMAT = Hermes()
