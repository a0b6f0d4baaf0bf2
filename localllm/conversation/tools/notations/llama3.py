"""Llama 3.1 to 3.3: a bare `{"name": …, "parameters": {…}}`, sometimes after <|python_tag|>.

An answer in JSON looks the same, so only functions that were offered count as calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    parameters_of,
)
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import any_call, arguments

_TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """Calls that may begin without any marker."""

    name = "llama3"
    signs = (_TAG, "Environment: ipython")
    ambiguity = 3
    markers = (_TAG, '{"name"', '{ "name"', '{"type": "function"')
    control = True
    opening = ""
    arguments_key = "parameters"

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        """Streams the arguments of calls of `tools`; a marker that is no tag is the call's own
        beginning."""
        names = frozenset(parameters_of(t)[0] for t in tools)
        reader = JsonReader(first, marker, JSON_HEAD, end="\0", names=names)
        if marker != _TAG:
            reader.begin(marker)
        return reader

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """An answer in JSON may begin like a call: only a known name with its parameters is one."""
        return {
            f'{{"name": {json.dumps(n)}, "parameters": ': GrammarTrigger("", arguments(s), "}")
            for n, s in tools
        }

    def unmarked_call(self, tools: NamedSchemas) -> str:
        return json_value(any_call(tools, self.arguments_key))


FORMATS = (Llama3(),)
