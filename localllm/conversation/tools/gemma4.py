"""Gemma 4: `<|tool_call>call:f{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>`, thoughts in a channel before it."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.gemma_notation import calls_in, gemma_calls
from localllm.conversation.tools.readers import BlockReader

_OPEN, _CLOSE, _QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class Gemma4(ToolFormat):
    """FunctionGemma's calls with other tokens."""

    name = "gemma4"
    signs = (_OPEN,)
    markers = (_OPEN,)
    control = True
    named_tokens = True
    # A channel opened twice is one. A result is for somebody else to write.
    drops = ("<channel|>", "<|channel>", TurnEnd("<|tool_response>"))
    think = ("<|channel>thought", "<channel|>")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing token."""
        return BlockReader(first, marker, _CLOSE, calls_in(_QUOTE))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        return {_OPEN: Start("", gemma_calls(tools, _QUOTE), _CLOSE, again=True)}


FORMAT = Gemma4()
