"""Command R7B and later: sections between control tokens.

Calls are a JSON array with `tool_name` and `parameters`.
"""

from __future__ import annotations

import json
import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, ToolFormat, Triggers
from localllm.conversation.tools.lark import any_of, json_value, text
from localllm.conversation.tools.readers import json_block
from localllm.conversation.tools.schemas import as_object

_OPEN = "<|START_ACTION|>"
_CLOSE = "<|END_ACTION|>"
_HEAD = re.compile(
    r'[\s\]},]*+\[?\s*+\{\s*+(?:"tool_call_id"\s*+:\s*+"[^"]*"\s*+,\s*+)?"tool_name"\s*+:\s*+("(?:[^"\\]|\\.)*")\s*+,\s*+'
    r'"parameters"\s*+:\s*+(?=\{)'
)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """One array with all calls, each on its own line."""
    rules: list[str] = []
    for f, (name, schema) in enumerate(tools):
        quoted = text(json.dumps(name, ensure_ascii=False))
        parameters = f'", \\"parameters\\": " {json_value(as_object(schema))}'
        rules.append(f'f{f}: "\\"tool_name\\": " {quoted} {parameters} "}}"')
    lark = [
        'start: "[" gap call ("," gap call)* gap "]"',
        r"gap: /\s{0,8}/",
        f'call: "{{" gap ("\\"tool_call_id\\": \\"" /[0-9]{{1,3}}/ "\\", ")? ({any_of(tools)})',
    ]
    return {_OPEN: GrammarTrigger("", ("lark", "\n".join([*lark, *rules]) + "\n"), _CLOSE)}


# All text of a reply is inside a section.
FORMATS = (
    ToolFormat(
        name="cohere",
        signs=(_OPEN,),
        markers=(_OPEN,),
        control=True,
        drops=(
            "<|START_RESPONSE|>",
            "<|END_RESPONSE|>",
            "<|START_TEXT|>",
            "<|END_TEXT|>",
            "<|END_THINKING|>",
        ),
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
        reader=json_block(_CLOSE, _HEAD),
        triggers=_triggers,
    ),
)
