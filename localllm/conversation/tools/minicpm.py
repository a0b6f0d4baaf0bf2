"""MiniCPM 5: `<function name="f"><param name="k">value</param></function>`, with CDATA where a value holds markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader
from localllm.conversation.tools.tagged import Opened, Tagged, read_calls, tagged_reader, typed
from localllm.conversation.tools.values import PythonValues

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)
_TAGGED = Tagged(re.compile(r'([^">]+)"\s*>'), "", re.compile(r'\s*<param name="([^">]+)">'), "</param>")
_TAGS = Tags(
    head=lambda name: f'{name}">',
    before=lambda key, kind: f'<param name="{key}">',
    after="</param>",
    end="</function>",
    text='"<![CDATA[" cdata "</param>" | /[^<&\\n]*/ "</param>"\ncdata[suffix="]]>"]: /(?s:.*)/',
    values=PythonValues,
)


class MiniCpm(ToolFormat):
    """One function with tagged parameters."""

    name = "minicpm"
    signs = ("<param name=",)
    markers = ('<function name="',)

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""

        def valued(function: re.Match[str], pairs: list[Opened]) -> dict[str, Any]:
            values: dict[str, Any] = {}
            for opening, value in pairs:
                quoted = _CDATA.match(value)
                values[opening[1]] = quoted[1] if quoted is not None else typed(value, opening[1], function[1], tools)
            return values

        return tagged_reader(
            first, marker, "</function>", _TAGGED, lambda block: read_calls(block, tools, _TAGGED, valued)
        )

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        return {self.markers[0]: Start("", tagged_calls(tools, _TAGS), again=True)}


FORMAT = MiniCpm()
