"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import JsonReader

_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_SECTION, _CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"


class Kimi(ToolFormat):
    """Numbered calls in one section."""

    name = "kimi"
    signs = (_SECTION,)
    # The model forgets the section at times.
    markers = (_SECTION, _CALL)
    in_thought = True
    control = True
    named_tokens = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of one call after the other up to the section's end."""
        reader = JsonReader(first, marker, _HEAD, end="<|tool_calls_section_end|>")
        if marker == _CALL:
            reader.begin(marker)
        return reader

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """The section opens the first call, its own token every other one."""
        lark = json_calls(
            tools, lambda name: f"{text(f'functions.{name}:')} /[0-9]{{1,3}}/ <|tool_call_argument_begin|>"
        )
        return {
            _SECTION: Start(_CALL, lark, "<|tool_call_end|>", again=True),
            _CALL: Start("", lark, "<|tool_call_end|>", again=True),
        }


FORMAT = Kimi()
