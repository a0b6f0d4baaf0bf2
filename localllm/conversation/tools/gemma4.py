"""Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`, thoughts in a channel before it."""

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import BlockReader, ToolFormat
from localllm.conversation.tools.function_gemma import calls_in

FORMAT = ToolFormat(
    name="gemma4",
    signs=("<|tool_call>",),
    markers=("<|tool_call>",),
    reader=lambda first, marker, tools: BlockReader(first, marker, "<tool_call|>", calls_in('<|"|>')),
    control=True,
    # A result is for somebody else to write.
    drops=("<channel|>", TurnEnd("<|tool_response>")),
    think=("<|channel>thought", "<channel|>"),
)
