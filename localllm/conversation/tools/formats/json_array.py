"""Phi-4-mini, Granite, Apriel, Nemotron Nano v2: a JSON array of `{"name": …, "arguments": {…}}`
after a marker."""

from __future__ import annotations

from typing import Any

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import call_list


def _array(marker: str, closing: str, **facts: Any) -> ToolFormat:
    def triggers(template: str, tools: NamedSchemas) -> Triggers:
        return {marker: GrammarTrigger("", call_list(tools))}

    return ToolFormat(
        markers=(marker,),
        reader=json_block(closing),
        triggers=triggers,
        **facts,
    )


FORMATS = (
    # Between control tokens. The closing one may be missing at the end.
    _array(
        "<|tool_call|>",
        "<|/tool_call|>",
        name="phi",
        signs=("<|tool_call|>",),
        ambiguity=1,
        control=True,
        opening="<|tool_call|>",
    ),
    # Between text tags.
    _array(
        "<tool_calls>",
        "</tool_calls>",
        name="apriel",
        signs=("</tool_calls>",),
        ambiguity=1,
        may_think=("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ),
    _array("<TOOLCALL>", "</TOOLCALL>", name="nemotron_v2", signs=("<TOOLCALL>",)),
)
