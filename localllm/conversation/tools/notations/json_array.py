"""Phi-4-mini, Granite, Apriel, Nemotron Nano v2: a JSON array of `{"name": …, "arguments": {…}}`
behind a marker."""

from __future__ import annotations

from typing import ClassVar

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.readers import JsonFormat
from localllm.conversation.tools.schemas import call_list


class Phi(JsonFormat):
    """Between control tokens; the closing one may be missing at the end."""

    name = "phi"
    signs = ("<|tool_call|>",)
    ambiguity = 1
    markers = ("<|tool_call|>",)
    control = True
    opening: ClassVar[str | None] = "<|tool_call|>"
    closing: ClassVar[str] = "<|/tool_call|>"

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {self.markers[0]: GrammarTrigger("", call_list(tools))}


class Apriel(Phi):
    """Between text tags."""

    name = "apriel"
    signs = ("</tool_calls>",)
    ambiguity = 1
    markers = ("<tool_calls>",)
    control = False
    opening = None
    closing = "</tool_calls>"
    may_think = ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")


class NemotronV2(Phi):
    """Between text tags."""

    name = "nemotron_v2"
    signs = ("<TOOLCALL>",)
    ambiguity = 0
    markers = ("<TOOLCALL>",)
    control = False
    opening = None
    closing = "</TOOLCALL>"


FORMATS = (Phi(), Apriel(), NemotronV2())
