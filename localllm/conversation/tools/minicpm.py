"""MiniCPM 5: `<function name="f"><param name="k">value</param></function>`, with CDATA where a value holds markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tagged import tagged, typed

_NAME = re.compile(r'([^">]+)"\s*>')
_PARAMETER = re.compile(r'\s*<param name="([^">]+)">')
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


class MiniCpm(FreeFormat):
    """One function with tagged parameters."""

    name = "minicpm"
    signs = ("<param name=",)
    markers = ('<function name="',)

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""

        def parse(block: str) -> list[Call] | None:
            head = _NAME.match(block)
            pairs = None if head is None else tagged(block[head.end() :], _PARAMETER, "</param>", ended=True)
            if head is None or pairs is None:
                return None
            values = {}
            for opening, value in pairs:
                quoted = _CDATA.match(value)
                values[opening[1]] = quoted[1] if quoted is not None else typed(value, opening[1], head[1], tools)
            return [(head[1], as_json(values))]

        return BlockReader(first, marker, "</function>", parse)


FORMAT = MiniCpm()
