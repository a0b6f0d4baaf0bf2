"""MiniMax M1: one call as JSON on each line between text tags, `<tool_calls>⏎{"name": …, "arguments": {…}}⏎</tool_calls>`."""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import any_call

_OPEN, _CLOSE = "<tool_calls>", "</tool_calls>"


class MiniMaxM1(ToolFormat):
    """All calls in one block."""

    name = "minimax_m1"
    signs = ("<beginning_of_sentence>ai name=",)
    markers = (_OPEN,)

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of one call after the other."""
        return JsonReader(first, marker, JSON_HEAD, end=_CLOSE)

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One block, which holds every call."""
        call = json_value(any_call(tools, "arguments"))
        return {_OPEN: Start("\n", ("lark", f'start: (call "\\n")+ "{_CLOSE}"\ncall: {call}\n'))}


FORMAT = MiniMaxM1()
