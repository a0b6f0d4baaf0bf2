"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section."""

import re

from localllm.conversation.tools.base import JsonReader, ToolFormat

_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
)

FORMAT = ToolFormat(
    name="kimi",
    signs=("<|tool_calls_section_begin|>",),
    markers=("<|tool_calls_section_begin|>",),
    reader=lambda first, marker, tools: JsonReader(first, marker, _HEAD, end="<|tool_calls_section_end|>"),
    control=True,
)
