"""GigaChat 3: one call as JSON after `<|function_call|>`, or as a message with its own role."""

from __future__ import annotations

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import one_call

# 3.1 uses a token for this, 3.0 a role.
_TOKEN = "<|function_call|>"
_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    opening = _TOKEN if _TOKEN in template else _ROLE
    return {opening: GrammarTrigger("", one_call(tools))}


FORMATS = (
    ToolFormat(
        name="gigachat",
        signs=(_TOKEN, "'function call'", '"function call"'),
        markers=(_TOKEN, _ROLE),
        control=True,
        reader=json_block(),
        triggers=_triggers,
    ),
)
