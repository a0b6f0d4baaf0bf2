"""Llama 3.1 to 3.3: a bare `{"name": …, "parameters": {…}}`, sometimes after <|python_tag|>.

An answer in JSON looks the same, so only functions that were offered count as calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.conversation.tools.base import JSON_HEAD, JsonReader, Tool, ToolFormat, parameters_of

_TAG = "<|python_tag|>"


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
    names = frozenset(parameters_of(t)[0] for t in tools)
    reader = JsonReader(first, marker, JSON_HEAD, end="\0", names=names)
    if marker != _TAG:
        reader.begin(marker)
    return reader


FORMAT = ToolFormat(
    name="llama3",
    signs=("<|python_tag|>", "Environment: ipython"),
    markers=(_TAG, '{"name"', '{ "name"', '{"type": "function"'),
    reader=_reader,
    control=True,
    opening="",
    arguments_key="parameters",
)
