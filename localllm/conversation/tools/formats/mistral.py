"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, since late 2025
`[TOOL_CALLS]name[ARGS]{…}`. The template shows which form a model writes.

A grammar can't spell the control token [ARGS]. In the second form it begins after [ARGS], so the
model writes the name unconstrained.
"""

from __future__ import annotations

import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.readers import JSON_HEAD, json_block
from localllm.conversation.tools.schemas import arguments, call_list

_HEAD = re.compile(
    JSON_HEAD.pattern
    + r"|[\s\]},]*+(?:\[TOOL_CALLS\])?\s*+([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*+(?=\{)"
)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """One array of calls, or in the newer form one opening per function."""
    if "[ARGS]" not in template:
        # If the template writes ids, an id of nine letters may follow the arguments.
        more = {}
        if '"id"' in template:
            more = {"id": {"type": "string", "pattern": "^[A-Za-z0-9]{9}$"}}
        return {"[TOOL_CALLS]": GrammarTrigger("", call_list(tools, more))}
    triggers: Triggers = {}
    for name, schema in tools:
        # The id is only for the model. Clients get one of ours.
        for end, lead in (("[ARGS]", ""), ("[CALL_ID]", "000000000[ARGS]")):
            triggers[f"[TOOL_CALLS]{name}{end}"] = GrammarTrigger(
                lead, arguments(schema), again=True
            )
    return triggers


FORMATS = (
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        ambiguity=1,
        markers=("[TOOL_CALLS]",),
        control=True,
        opening="[TOOL_CALLS]",
        may_think=("[THINK]", "[/THINK]"),
        reader=json_block(head=_HEAD),
        triggers=_triggers,
    ),
)
