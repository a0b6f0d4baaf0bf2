"""GigaChat 3: one call as JSON behind `<|function_call|>`, or as a message of a role of its own."""

from __future__ import annotations

from localllm.conversation.tools.base import GrammarTrigger, ToolFormat
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import one_call

# 3.1 has a token for what 3.0 has a role for.
_TOKEN = "<|function_call|>"
_ROLE = "<|message_sep|>\n\nfunction call<|role_sep|>\n"


FORMATS = (
    ToolFormat(
        name="gigachat",
        signs=(_TOKEN, "'function call'", '"function call"'),
        markers=(_TOKEN, _ROLE),
        control=True,
        reader=json_block(),
        triggers=lambda template, tools: {
            (_TOKEN if _TOKEN in template else _ROLE): GrammarTrigger("", one_call(tools))
        },
    ),
)
