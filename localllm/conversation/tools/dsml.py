"""DeepSeek V3.2 and V4: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>…`.

Each value says itself whether it is text or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader
from localllm.conversation.tools.tagged import Opened, Tagged, read_calls, tagged_reader

_TAGGED = Tagged(
    re.compile(r'\s*<｜DSML｜invoke name="([^"]+)">'),
    "</｜DSML｜invoke>",
    re.compile(r'\s*<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>'),
    "</｜DSML｜parameter>",
)
_TAGS = Tags(
    head=lambda name: f'<｜DSML｜invoke name="{name}">\n',
    before=lambda key, kind: f'<｜DSML｜parameter name="{key}" string="{json.dumps(kind == "string")}">',
    after="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>\n",
    loose=True,  # V4 writes an empty line where there is no parameter
)


def _valued(function: re.Match[str], pairs: list[Opened]) -> dict[str, Any]:
    return {m[1]: json.loads(v) if m[2] == "false" else v for m, v in pairs}


class Dsml(ToolFormat):
    """All calls in one block."""

    name = "dsml"
    signs = ("<｜DSML｜", "｜DSML｜")
    markers = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to the closing tag of the one that opened it."""
        return tagged_reader(
            first, marker, marker.replace("<", "</"), _TAGGED, lambda block: read_calls(block, tools, _TAGGED, _valued)
        )

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One block, which holds every call."""
        return {
            marker: Start("\n", tagged_calls(tools, _TAGS, repeat=True, closing=marker.replace("<", "</")))
            for marker in self.markers
        }


FORMAT = Dsml()
