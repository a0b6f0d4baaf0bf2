"""FunctionGemma: `<start_function_call>call:f{city:<escape>Paris<escape>,days:[1,2]}<end_function_call>`."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.gemma_notation import calls_in, gemma_calls
from localllm.conversation.tools.readers import BlockReader

_OPEN, _CLOSE, _QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


class FunctionGemma(ToolFormat):
    """One call in Gemma's notation between two control tokens."""

    name = "function_gemma"
    signs = (_OPEN,)
    markers = (_OPEN,)
    control = True
    named_tokens = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing token."""
        return BlockReader(first, marker, _CLOSE, calls_in(_QUOTE))

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Any number of calls, one behind the other."""
        return {_OPEN: Start("", gemma_calls(tools, _QUOTE), _CLOSE, again=True)}


FORMAT = FunctionGemma()
