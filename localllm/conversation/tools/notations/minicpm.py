"""MiniCPM 5: `<function name="f"><param name="k">value</param></function>`, with CDATA where a
value holds markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from localllm.conversation.tools.base import Tool
from localllm.conversation.tools.call_grammars import TagGrammar
from localllm.conversation.tools.readers import Call
from localllm.conversation.tools.tag_reader import (
    RawParameter,
    TagPatterns,
    read_calls,
    tagged_format,
    typed,
)
from localllm.conversation.tools.values import PYTHON, SpelledValues

_CDATA = re.compile(r"\s*<!\[CDATA\[(.*)\]\]>\s*\Z", re.DOTALL)


def _calls(block: str, tools: Sequence[Tool], patterns: TagPatterns) -> list[Call] | None:
    def valued(function: re.Match[str], pairs: list[RawParameter]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for opening, value in pairs:
            quoted = _CDATA.match(value)
            values[opening[1]] = (
                quoted[1] if quoted is not None else typed(value, opening[1], function[1], tools)
            )
        return values

    return read_calls(block, tools, patterns, valued)


FORMATS = (
    tagged_format(
        name="minicpm",
        signs=("<param name=",),
        markers=('<function name="',),
        closing="</function>",
        calls=_calls,
        patterns=TagPatterns(
            re.compile(r'([^">]+)"\s*>'), "", re.compile(r'\s*<param name="([^">]+)">'), "</param>"
        ),
        grammar=TagGrammar(
            head=lambda name: f'{name}">',
            before=lambda key, kind: f'<param name="{key}">',
            after="</param>",
            end="</function>",
            text='"<![CDATA[" cdata "</param>" | /[^<&\\n]*/ "</param>"\n'
            'cdata[suffix="]]>"]: /(?s:.*)/',
            values=partial(SpelledValues, PYTHON),
        ),
    ),
)
