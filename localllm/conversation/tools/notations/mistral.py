"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, and since late 2025
`[TOOL_CALLS]name[ARGS]{…}`.

A grammar can't spell the control token [ARGS], so in the second form it takes over behind it: the
name is the model's.
"""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.readers import JSON_HEAD, JsonFormat
from localllm.conversation.tools.schemas import arguments, call_list

_HEAD = re.compile(
    JSON_HEAD.pattern
    + r"|[\s\]},]*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)"
)

_ID = '"id"'


class Mistral(JsonFormat):
    """Both spellings: the template says which one a model writes."""

    name = "mistral"
    signs = ("[TOOL_CALLS]",)
    ambiguity = 1
    markers = ("[TOOL_CALLS]",)
    control = True
    opening = "[TOOL_CALLS]"
    may_think = ("[THINK]", "[/THINK]")
    head = _HEAD

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """One array of calls; in the newer spelling an opening for each function."""
        if "[ARGS]" not in template:
            # Where the template writes ids, one of nine letters may stand behind the arguments.
            more = (
                {"id": {"type": "string", "pattern": "^[A-Za-z0-9]{9}$"}} if _ID in template else {}
            )
            return {"[TOOL_CALLS]": GrammarTrigger("", call_list(tools, more))}
        triggers: dict[str, GrammarTrigger] = {}
        for name, schema in tools:
            triggers[f"[TOOL_CALLS]{name}[ARGS]"] = GrammarTrigger(
                "", arguments(schema), again=True
            )
            # An id is for the model alone: clients get one of ours.
            triggers[f"[TOOL_CALLS]{name}[CALL_ID]"] = GrammarTrigger(
                "000000000[ARGS]", arguments(schema), again=True
            )
        return triggers


FORMATS = (Mistral(),)
