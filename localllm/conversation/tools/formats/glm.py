"""GLM-4.5 and later:
`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>…</tool_call>`."""

from __future__ import annotations

import re

from localllm.conversation.tools.call_grammars import NAME, TagGrammar
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format

FORMATS = (
    tagged_format(
        name="glm",
        signs=("<arg_key>",),
        markers=("<tool_call>",),
        calls_in_reasoning=True,
        patterns=TagPatterns(
            re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>|\Z)"),
            "",
            re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>", re.DOTALL),
            "</arg_value>",
        ),
        # GLM 4.5 and 4.6 write these newlines, 4.7 and later do not, Ling writes half of them.
        grammar=TagGrammar(
            head=f"{NAME}\n",
            before=f"<arg_key>{NAME}</arg_key>\n<arg_value>",
            after="</arg_value>\n",
            end="</tool_call>",
            loose=True,
        ),
    ),
)
