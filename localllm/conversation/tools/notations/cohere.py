"""Command R7B and later: sections between control tokens; calls are a JSON array with `tool_name`
and `parameters`."""

from __future__ import annotations

import json
import re

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas
from localllm.conversation.tools.lark import any_of, json_value, text
from localllm.conversation.tools.readers import JsonFormat
from localllm.conversation.tools.schemas import as_object

_OPEN, _CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
_HEAD = re.compile(
    r'[\s\]},]*\[?\s*\{\s*(?:"tool_call_id"\s*:\s*"[^"]*"\s*,\s*)?"tool_name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"parameters"\s*:\s*(?=\{)'
)


class Cohere(JsonFormat):
    """Everything a reply says stands in a section."""

    name = "cohere"
    signs = (_OPEN,)
    markers = (_OPEN,)
    control = True
    drops = (
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_THINKING|>",
    )
    think = ("<|START_THINKING|>", "<|END_THINKING|>")
    head = _HEAD
    closing = _CLOSE

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """One array, which holds every call; each on a line of its own."""
        rules = [
            f'f{f}: "\\"tool_name\\": " {text(json.dumps(name, ensure_ascii=False))} ", '
            '\\"parameters\\": " '
            f'{json_value(as_object(schema))} "}}"'
            for f, (name, schema) in enumerate(tools)
        ]
        lark = [
            'start: "[" gap call ("," gap call)* gap "]"',
            r"gap: /\s{0,8}/",
            f'call: "{{" gap ("\\"tool_call_id\\": \\"" /[0-9]{{1,3}}/ "\\", ")? ({any_of(tools)})',
        ]
        return {_OPEN: GrammarTrigger("", ("lark", "\n".join([*lark, *rules]) + "\n"), _CLOSE)}


FORMATS = (Cohere(),)
