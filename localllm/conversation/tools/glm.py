"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader
from localllm.conversation.tools.tagged import Tagged, in_tags, tagged_reader

_TAGGED = Tagged(
    re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)"),
    "",
    re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>", re.DOTALL),
    "</arg_value>",
)
# The newlines of GLM 4.5 and 4.6 are gone since 4.7, and half of them at Ling.
_TAGS = Tags(
    head=lambda name: f"{name}\n",
    before=lambda key, kind: f"<arg_key>{key}</arg_key>\n<arg_value>",
    after="</arg_value>\n",
    end="</tool_call>",
    loose=True,
)


class Glm(ToolFormat):
    """A name and pairs of tagged keys and values."""

    name = "glm"
    signs = ("<arg_key>",)
    markers = ("<tool_call>",)
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""
        return tagged_reader(first, marker, "</tool_call>", _TAGGED, lambda block: in_tags(block, tools, _TAGGED))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        return {"<tool_call>": Start("", tagged_calls(tools, _TAGS), again=True)}


FORMAT = Glm()
