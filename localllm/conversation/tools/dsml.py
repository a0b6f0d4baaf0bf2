"""DeepSeek V3.2 and V4: `<｜DSML｜invoke name="f"><｜DSML｜parameter name="k" string="true">v</｜DSML｜parameter>…`.

Each value says itself whether it is text or JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tagged import functions, tagged

_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"]+)">')
_PARAMETER = re.compile(r'\s*<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>')


def _parse(block: str) -> list[Call] | None:
    calls: list[Call] = []
    for head, body, ended in functions(block, _INVOKE, "</｜DSML｜invoke>") or ():
        pairs = tagged(body, _PARAMETER, "</｜DSML｜parameter>", ended=ended)
        if pairs is None:
            return None
        try:
            values = {m[1]: json.loads(v) if m[2] == "false" else v for m, v in pairs}
        except (ValueError, RecursionError):
            return None
        calls.append((head[1], as_json(values)))
    return calls or None


class Dsml(FreeFormat):
    """All calls in one block."""

    name = "dsml"
    signs = ("<｜DSML｜", "｜DSML｜")
    markers = ("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    in_thought = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to the closing tag of the one that opened it."""
        return BlockReader(first, marker, marker.replace("<", "</"), _parse)


FORMAT = Dsml()
