"""Kimi: K2's numbered calls between control tokens, and K3's named sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.call_grammars import ANY_NUMBER, KIND, NAME, TagGrammar
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import JsonReader
from localllm.conversation.tools.tag_reader import TagPatterns, tagged_format

_HEAD = re.compile(
    r"\s*+(?:<\|tool_call_end\|>)?\s*+<\|tool_call_begin\|>\s*+(?:functions\.)?([\w.-]+?)(?::\d+)?\s*+"
    r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
)
_SECTION = "<|tool_calls_section_begin|>"
_CALL = "<|tool_call_begin|>"


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
    end = "<|tool_calls_section_end|>"
    return JsonReader(first, marker, _HEAD, end, is_part=marker == _CALL)


def _before_arguments(name: str) -> str:
    return f"{text(f'functions.{name}:')} /[0-9]{{1,3}}/ <|tool_call_argument_begin|>"


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    """The section token opens the first call, the call token every other one."""
    lark = json_calls(tools, _before_arguments)
    return {
        _SECTION: GrammarTrigger(_CALL, lark, "<|tool_call_end|>", again=True, once=True),
        _CALL: GrammarTrigger("", lark, "<|tool_call_end|>", again=True),
    }


def _kind(kind: str) -> str:
    return "number" if kind == "integer" else kind


def _is_json(argument: re.Match[str]) -> bool:
    return argument[2] not in (None, "string")


_K3_PATTERNS = TagPatterns(
    re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>'),
    "<|close|>call<|sep|>",
    re.compile(r'\s*<\|open\|>argument key="([^"]+)"(?: type="(\w+)")?[^<]*<\|sep\|>'),
    "<|close|>argument<|sep|>",
    is_json=_is_json,
)
_K3_GRAMMAR = TagGrammar(
    head=f'<|open|>call tool="{NAME}" index="{ANY_NUMBER}"<|sep|>',
    before=f'<|open|>argument key="{NAME}" type="{KIND}"<|sep|>',
    after="<|close|>argument<|sep|>",
    end="<|close|>call<|sep|>",
    kind_text=_kind,
    tokens=True,
)


FORMATS = (
    # K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in
    # a section.
    ToolFormat(
        name="kimi",
        signs=(_SECTION,),
        markers=(_SECTION, _CALL),  # the model sometimes omits the section
        calls_in_reasoning=True,
        control=True,
        named_tokens=True,
        reader=_reader,
        triggers=_triggers,
    ),
    # K3: sections between control tokens, `<|open|>tools<|sep|><|open|>call tool="f"
    # index="1"<|sep|>…`. `think` holds the reasoning, `response` the answer, `tools` the calls.
    # Each argument has its own type attribute.
    tagged_format(
        name="kimi_k3",
        signs=("<|open|>",),
        markers=("<|open|>tools<|sep|>",),
        control=True,
        named_tokens=True,
        drops=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>think<|sep|>",
            TurnEnd("<|close|>message<|sep|>"),
        ),
        think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        closing="<|close|>tools<|sep|>",
        one_block=True,
        patterns=_K3_PATTERNS,
        grammar=_K3_GRAMMAR,
    ),
)
