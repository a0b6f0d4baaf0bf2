"""Kimi: K2's numbered calls between control tokens, and K3's named sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.call_grammars import ANY_NUMBER, TagGrammar
from localllm.conversation.tools.lark import json_calls, text
from localllm.conversation.tools.readers import JsonReader
from localllm.conversation.tools.tag_reader import TaggedFormat, TagPatterns

_HEAD = re.compile(
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>\s*(?=\{)"
)
_SECTION, _CALL = "<|tool_calls_section_begin|>", "<|tool_call_begin|>"


class Kimi(ToolFormat):
    """K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in
    a section."""

    name = "kimi"
    signs = (_SECTION,)
    # The model forgets the section at times.
    markers = (_SECTION, _CALL)
    calls_in_reasoning = True
    control = True
    named_tokens = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> JsonReader:
        reader = JsonReader(first, marker, _HEAD, end="<|tool_calls_section_end|>")
        if marker == _CALL:
            reader.begin(marker)
        return reader

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """The section opens the first call, its own token every other one."""
        lark = json_calls(
            tools,
            lambda name: (
                f"{text(f'functions.{name}:')} /[0-9]{{1,3}}/ <|tool_call_argument_begin|>"
            ),
        )
        return {
            _SECTION: GrammarTrigger(_CALL, lark, "<|tool_call_end|>", again=True),
            _CALL: GrammarTrigger("", lark, "<|tool_call_end|>", again=True),
        }


_PATTERNS = TagPatterns(
    re.compile(r'\s*<\|open\|>call tool="([^"]+)"[^<]*<\|sep\|>'),
    "<|close|>call<|sep|>",
    re.compile(r'\s*<\|open\|>argument key="([^"]+)"(?: type="(\w+)")?[^<]*<\|sep\|>'),
    "<|close|>argument<|sep|>",
    is_json=lambda opening: opening[2] not in (None, "string"),
)


def _before(key: str, kind: str) -> str:
    shown = "number" if kind == "integer" else kind
    return f'<|open|>argument key="{key}" type="{shown}"<|sep|>'


_GRAMMAR = TagGrammar(
    head=lambda name: f'<|open|>call tool="{name}" index="{ANY_NUMBER}"<|sep|>',
    before=_before,
    after="<|close|>argument<|sep|>",
    end="<|close|>call<|sep|>",
    tokens=True,
)


class KimiK3(TaggedFormat):
    """Sections between control tokens, `<|open|>tools<|sep|><|open|>call tool="f"
    index="1"<|sep|>…`: `think` holds the reasoning, `response` the answer, `tools` the calls; each
    argument says its own type."""

    name = "kimi_k3"
    signs = ("<|open|>",)
    markers = ("<|open|>tools<|sep|>",)
    control = True
    named_tokens = True
    drops = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>think<|sep|>",
        TurnEnd("<|close|>message<|sep|>"),
    )
    think = ("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    closing = "<|close|>tools<|sep|>"
    one_block = True
    patterns = _PATTERNS
    grammar = _GRAMMAR


FORMATS = (Kimi(), KimiK3())
