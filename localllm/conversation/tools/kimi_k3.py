"""Kimi K3: sections named between control tokens, `<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>…`.

`think` holds the reasoning, `response` the answer, `tools` the calls; each argument says its own type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import FreeFormat, Tool
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tagged import functions, tagged

_CALL = re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>')
_ARGUMENT = re.compile(r'\s*<\|open\|>argument key="([^"]+)"(?: type="(\w+)")?[^<]*<\|sep\|>')


def _parse(block: str) -> list[Call] | None:
    calls: list[Call] = []
    for head, body, ended in functions(block, _CALL, "<|close|>call<|sep|>") or ():
        pairs = tagged(body, _ARGUMENT, "<|close|>argument<|sep|>", ended=ended)
        if pairs is None:
            return None
        try:
            values = {m[1]: v if m[2] in (None, "string") else json.loads(v) for m, v in pairs}
        except (ValueError, RecursionError):
            return None
        calls.append((head[1], as_json(values)))
    return calls or None


class KimiK3(FreeFormat):
    """Everything a reply says stands in a section."""

    name = "kimi_k3"
    signs = ("<|open|>",)
    markers = ("<|open|>tools<|sep|>",)
    control = True
    drops = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>think<|sep|>",
        TurnEnd("<|close|>message<|sep|>"),
    )
    think = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the section up to its end."""
        return BlockReader(first, marker, "<|close|>tools<|sep|>", _parse)


FORMAT = KimiK3()
