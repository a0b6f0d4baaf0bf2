"""Qwen3-Coder, Nemotron 3, Seed-OSS: `<function=name><parameter=key>value</parameter></function>`
in outer tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, Tool, ToolFormat
from localllm.conversation.tools.call_grammars import TagGrammar, tagged_calls
from localllm.conversation.tools.readers import BlockReader, Call, json_arguments
from localllm.conversation.tools.tag_reader import TagPatterns, is_open, tagged_reader, typed_calls
from localllm.conversation.tools.values import JsonValues, PythonValues

_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")
_END = "</function>"


def _parse(tools: Sequence[Tool], patterns: TagPatterns, block: str) -> list[Call] | None:
    calls = typed_calls(block, tools, patterns)
    if calls is not None:
        return calls
    # Functionary's spelling, which small models mix in.
    head = _FUNCTION.match(block)
    if head is None:
        return None
    arguments = json_arguments(block[head.end() :].strip().removesuffix(_END))
    return None if arguments is None else [(head[1], arguments)]


class QwenCoder(ToolFormat):
    name = "qwen_coder"
    signs = ("<function=",)
    ambiguity = 1
    # The model forgets the outer tag at times.
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    closing: ClassVar[str] = "</tool_call>"
    patterns: ClassVar[TagPatterns] = TagPatterns(
        _FUNCTION, _END, _PARAMETER, "</parameter>", wrapped=True
    )
    grammar: ClassVar[TagGrammar] = TagGrammar(
        head=lambda name: f"<function={name}>\n",
        before=lambda key, kind: f"<parameter={key}>\n",
        after="\n</parameter>\n",
        end=_END,
        values=partial(JsonValues, python=True),
    )
    calls_in_reasoning = True

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        if marker == self.markers[0]:
            return tagged_reader(
                first, marker, self.closing, self.patterns, partial(_parse, tools, self.patterns)
            )
        return BlockReader(
            first,
            marker,
            _END,
            lambda block: _parse(tools, self.patterns, marker + block + _END),
            tail=self.closing,
            is_open=lambda block: is_open(marker + block + _END, self.patterns),
        )

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """Any number of calls, one behind the other, with or without their outer tag: an offered
        name tells of it."""
        closing = f"\n{self.closing}"
        inner = replace(self.grammar, head=lambda name: "")
        forgotten = {
            self.grammar.head(tool[0])[:-1]: GrammarTrigger(
                "\n", tagged_calls([tool], inner), closing, again=True
            )
            for tool in tools
        }
        return {
            self.markers[0]: GrammarTrigger(
                "\n", tagged_calls(tools, self.grammar), closing, again=True
            ),
            **forgotten,
        }


class Seed(QwenCoder):
    """Seed-OSS: outer tags of its own, values on one line and in Python's spelling."""

    name = "seed"
    signs = ("<seed:tool_call>",)
    ambiguity = 0
    markers = ("<seed:tool_call>", "<function=")
    closing = "</seed:tool_call>"
    may_think = ("<seed:think>", "</seed:think>")
    control = True
    patterns = replace(QwenCoder.patterns, wrapped=False)
    grammar = replace(
        QwenCoder.grammar,
        before=lambda key, kind: f"<parameter={key}>",
        after="</parameter>\n",
        values=PythonValues,
    )


FORMATS = (QwenCoder(), Seed())
