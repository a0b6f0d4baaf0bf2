"""Phi-4-mini and Granite: `<|tool_call|>[{"name": …, "arguments": {…}}]`, closed by <|/tool_call|> or the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from localllm.conversation.tools.base import Named, Start, Tool, ToolFormat
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import call_list


class Phi(ToolFormat):
    """All calls in one JSON array."""

    name = "phi"
    signs = ("<|tool_call|>",)
    unsure = 1
    markers = ("<|tool_call|>",)
    control = True
    opening: ClassVar[str | None] = "<|tool_call|>"
    closing: ClassVar[str] = "<|/tool_call|>"

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of one call after the other."""
        return JsonReader(first, marker, JSON_HEAD, end=self.closing)

    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """One array, which holds every call."""
        return {self.markers[0]: Start("", call_list(tools))}


FORMAT = Phi()
