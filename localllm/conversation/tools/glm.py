"""GLM-4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tagged import tagged, typed

_NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    match = _NAME.match(block)
    pairs = tagged(block[match.end() :], _PAIR, "</arg_value>", ended=True) if match is not None else None
    if match is None or pairs is None:
        return None
    name = match[1]
    values = {m[1].strip(): typed(v.strip("\n"), m[1].strip(), name, tools) for m, v in pairs}
    return [(name, as_json(values))]


class Glm(ToolFormat):
    """A name and pairs of tagged keys and values."""

    name = "glm"
    signs = ("<arg_key>",)
    markers = ("<tool_call>",)
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""
        return BlockReader(first, marker, "</tool_call>", partial(_parse, tools))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        lark = tagged_calls(
            tools,
            head=lambda name: f"{name}\n",
            before=lambda key: f"<arg_key>{key}</arg_key>\n<arg_value>",
            after="</arg_value>\n",
            end="",
        )
        return {"<tool_call>": Start("", lark, "</tool_call>", again=True)}


FORMAT = Glm()
