"""Llama 3.1 to 3.3: a bare `{"name": …, "parameters": {…}}`, sometimes after <|python_tag|>.

A JSON answer looks the same, so only offered functions count as calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
    parameters_of,
)
from localllm.conversation.tools.lark import json_value
from localllm.conversation.tools.readers import JSON_HEAD, JsonReader
from localllm.conversation.tools.schemas import any_call, arguments

_TAG = "<|python_tag|>"
_KEY = "parameters"


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
    """Streams the arguments of calls of `tools`. A marker other than the tag is part of the
    call."""
    names = frozenset(parameters_of(t)[0] for t in tools)
    return JsonReader(first, marker, JSON_HEAD, "\0", names=names, is_part=marker != _TAG)


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """One trigger per function. A JSON answer may begin like a call, so the name must be known."""
    triggers: Triggers = {}
    for name, schema in tools:
        opening = f'{{"name": {json.dumps(name)}, "{_KEY}": '
        triggers[opening] = GrammarTrigger("", arguments(schema), "}")
    return triggers


def _unmarked_call(tools: NamedSchemas) -> str:
    return json_value(any_call(tools, _KEY))


FORMATS = (
    # Calls that may begin without any marker.
    ToolFormat(
        name="llama3",
        signs=(_TAG, "Environment: ipython"),
        ambiguity=3,
        markers=(_TAG, '{"name"', '{ "name"', '{"type": "function"'),
        control=True,
        opening="",
        arguments_key=_KEY,
        reader=_reader,
        triggers=_triggers,
        unmarked_call=_unmarked_call,
    ),
)
