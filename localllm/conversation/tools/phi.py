"""Phi-4-mini and Granite: `<|tool_call|>[{"name": …, "arguments": {…}}]`, closed by <|/tool_call|> or the end."""

from localllm.conversation.tools.base import JSON_HEAD, JsonReader, ToolFormat

FORMAT = ToolFormat(
    name="phi",
    signs=("<|tool_call|>",),
    markers=("<|tool_call|>",),
    reader=lambda first, marker, tools: JsonReader(first, marker, JSON_HEAD, end="<|/tool_call|>"),
    control=True,
    opening="<|tool_call|>",
)
