"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Also the default for models whose
template knows no tools (see `prompt.py`)."""

from localllm.conversation.tools.base import JSON_HEAD, JsonReader, ToolFormat

FORMAT = ToolFormat(
    name="hermes",
    signs=("<tool_call>",),
    markers=("<tool_call>",),
    reader=lambda first, marker, tools: JsonReader(first, marker, JSON_HEAD, end="</tool_call>"),
    opening="<tool_call>\n",
)
