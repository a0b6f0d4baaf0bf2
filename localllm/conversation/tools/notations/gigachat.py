"""GigaChat 3: one call as JSON behind `<|function_call|>`, or as a message of a role of its own."""

from __future__ import annotations

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.readers import JsonFormat
from localllm.conversation.tools.schemas import one_call

_TOKEN, _ROLE = "<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n"


class GigaChat(JsonFormat):
    """Both spellings: 3.1 has a token for what 3.0 has a role for."""

    name = "gigachat"
    signs = (_TOKEN, "'function call'", '"function call"')
    markers = (_TOKEN, _ROLE)
    control = True

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        return {(_TOKEN if _TOKEN in template else _ROLE): GrammarTrigger("", one_call(tools))}


FORMATS = (GigaChat(),)
