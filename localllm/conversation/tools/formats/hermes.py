"""Hermes and Qwen 2.5/3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

Also the default for models whose template has no tools (see `prompt.py`).
"""

from __future__ import annotations

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import one_call


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    trigger = GrammarTrigger("\n", one_call(tools), "\n</tool_call>", again=True)
    return {"<tool_call>": trigger}


FORMATS = (
    ToolFormat(
        name="hermes",
        signs=("<tool_call>",),
        ambiguity=2,
        markers=("<tool_call>",),
        calls_in_reasoning=True,
        opening="<tool_call>\n",
        reader=json_block("</tool_call>"),
        triggers=_triggers,
    ),
)
