"""Kimi K3: sections named between control tokens, `<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>…`.

`think` holds the reasoning, `response` the answer, `tools` the calls; each argument says its own type.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.calls import ANY_NUMBER, Tags, tagged_calls
from localllm.conversation.tools.readers import BlockReader
from localllm.conversation.tools.tagged import Opened, Tagged, read_calls, tagged_reader

_OPEN, _CLOSE = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
_TAGGED = Tagged(
    re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>'),
    "<|close|>call<|sep|>",
    re.compile(r'\s*<\|open\|>argument key="([^"]+)"(?: type="(\w+)")?[^<]*<\|sep\|>'),
    "<|close|>argument<|sep|>",
)


def _before(key: str, kind: str) -> str:
    shown = "number" if kind == "integer" else kind
    return f'<|open|>argument key="{key}" type="{shown}"<|sep|>'


_TAGS = Tags(
    head=lambda name: f'<|open|>call tool="{name}" index="{ANY_NUMBER}"<|sep|>',
    before=_before,
    after="<|close|>argument<|sep|>",
    end="<|close|>call<|sep|>",
    tokens=True,
)


def _valued(function: re.Match[str], pairs: list[Opened]) -> dict[str, Any]:
    return {m[1]: v if m[2] in (None, "string") else json.loads(v) for m, v in pairs}


class KimiK3(ToolFormat):
    """Everything a reply says stands in a section."""

    name = "kimi_k3"
    signs = ("<|open|>",)
    markers = (_OPEN,)
    control = True
    named_tokens = True
    drops = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>think<|sep|>",
        TurnEnd("<|close|>message<|sep|>"),
    )
    think = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the section up to its end."""
        return tagged_reader(first, marker, _CLOSE, _TAGGED, lambda block: read_calls(block, tools, _TAGGED, _valued))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One section, which holds every call."""
        return {_OPEN: Start("", tagged_calls(tools, _TAGS, repeat=True, closing=_CLOSE))}


FORMAT = KimiK3()
