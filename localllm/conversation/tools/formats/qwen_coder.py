"""Qwen3-Coder, Nemotron 3, Seed-OSS: `<function=name><parameter=key>value</parameter></function>`
in outer tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm import json_store
from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.call_grammars import NAME, TagGrammar, tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tag_reader import TagPatterns, is_open, typed_calls
from localllm.conversation.tools.values import PYTHON, json_or_python

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")
_END = "</function>"


def _parse(tools: Sequence[Tool], patterns: TagPatterns, block: str) -> list[Call] | None:
    calls = typed_calls(block, tools, patterns)
    if calls is not None:
        return calls
    # Functionary's form, which small models sometimes write instead.
    head = _FUNCTION.match(block)
    if head is None:
        return None
    values = json_store.parsed(block[head.end() :].strip().removesuffix(_END))
    if isinstance(values, dict):
        return [(head[1], as_json(values))]
    return None


def _format(outer: str, patterns: TagPatterns, grammar: TagGrammar, **facts: Any) -> ToolFormat:
    """Calls in the tag `outer`, which the model sometimes omits."""
    closing = outer.replace("<", "</")

    def reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        # Without the outer tag, marker and end are the function's own tags.
        begin = ""
        end = ""
        if marker != outer:
            begin = marker
            end = _END

        def parse(block: str) -> list[Call] | None:
            return _parse(tools, patterns, begin + block + end)

        def ends_in_a_value(block: str) -> bool:
            return is_open(begin + block + end, patterns)

        if marker == outer:
            return BlockReader(first, marker, closing, parse, is_open=ends_in_a_value)
        return BlockReader(first, marker, _END, parse, tail=closing, is_open=ends_in_a_value)

    def triggers(template: str, tools: NamedSchemas) -> Triggers:
        """Any number of calls in a row, with or without the outer tag.

        Without it, the name of an offered function marks a call.
        """
        calls = {outer: tagged_calls(tools, grammar)}
        inner = replace(grammar, head="")
        for tool in tools:
            calls[grammar.opening(tool[0])[:-1]] = tagged_calls([tool], inner)
        return {
            opening: GrammarTrigger("\n", call, f"\n{closing}", again=True)
            for opening, call in calls.items()
        }

    return ToolFormat(
        markers=(outer, "<function="),
        calls_in_reasoning=True,
        reader=reader,
        triggers=triggers,
        **facts,
    )


_PATTERNS = TagPatterns(_FUNCTION, _END, _PARAMETER, "</parameter>", wrapped=True)
_GRAMMAR = TagGrammar(
    head=f"<function={NAME}>\n",
    before=f"<parameter={NAME}>\n",
    after="\n</parameter>\n",
    end=_END,
    json=json_or_python,
)
FORMATS = (
    _format(
        "<tool_call>", _PATTERNS, _GRAMMAR, name="qwen_coder", signs=("<function=",), ambiguity=1
    ),
    # Its own outer tags, with values on one line in Python's spelling.
    _format(
        "<seed:tool_call>",
        replace(_PATTERNS, wrapped=False),
        replace(
            _GRAMMAR,
            before=f"<parameter={NAME}>",
            after="</parameter>\n",
            spelling=PYTHON,
        ),
        name="seed",
        signs=("<seed:tool_call>",),
        may_think=("<seed:think>", "</seed:think>"),
        control=True,
    ),
)
