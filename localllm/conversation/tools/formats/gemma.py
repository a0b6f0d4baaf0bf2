"""Gemma: `call:f{city:<|"|>Paris<|"|>,days:[1,2]}`, i.e. JSON with a control token as quotes and
bare keys."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    NotConstrainableError,
    ToolFormat,
    Triggers,
)
from localllm.conversation.tools.call_grammars import listed_calls
from localllm.conversation.tools.lark import text
from localllm.conversation.tools.literals import LiteralReader
from localllm.conversation.tools.readers import Call, as_json, read_block
from localllm.conversation.tools.values import Spelling

_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE_TEXT = re.compile(r"[^,:{}\[\]<]+")
_NAME = re.compile(r"[\w.-]+")


class _GemmaReader(LiteralReader):
    """Texts are between `quote`s, or bare like keys."""

    lists: ClassVar[Mapping[str, str]] = {"[": "]"}

    def __init__(self, quote: str) -> None:
        self._quote = quote

    def scalar(self, text: str, at: int) -> tuple[object, int]:
        literal, end = self.key(text, at)
        if text.startswith(self._quote, at):
            return literal, end
        if literal == "None":
            return None, end
        try:
            return json.loads(literal), end
        except ValueError:
            return literal, end

    def key(self, text: str, at: int) -> tuple[str, int]:
        if text.startswith(self._quote, at):
            begin = at + len(self._quote)
            end = text.index(self._quote, begin)
            return text[begin:end], end + len(self._quote)
        bare = _BARE_TEXT.match(text, at)
        if bare is None:
            raise ValueError
        return bare[0].strip(), bare.end()

    def calls(self, block: str) -> list[Call] | None:
        """The single call of a complete block."""
        match = _CALL.match(block)
        if match is None:
            return None
        try:
            values, at = self.value(block, match.end())
        except (ValueError, RecursionError):
            return None
        if block[at:].strip():
            return None
        return [(match[1], as_json(values))]


def _spelling(quote: str) -> Spelling:
    """Texts are quoted by a control token, keys are bare."""
    any_text = f"{quote} /(?s:.*)/ {quote}"
    names = _NAME.pattern

    def this_text(literal: str) -> str:
        inside = text(literal) if literal else ""
        return f"{quote} {inside} {quote}"

    def member(key: str, value: str, _: object) -> str:
        if _NAME.fullmatch(key):
            return f"{text(f'{key}:')} {value}"
        return f'{this_text(key)} ":" {value}'

    def any_member(value: str) -> str:
        return f'(/{names}/ | {any_text}) ":" {value}'

    return Spelling(
        any_text=any_text,
        this_text=this_text,
        member=member,
        any_member=any_member,
        truth=_truth,
        sorts=str.lower,  # Jinja's dictsort ignores case
    )


def _truth(value: bool | None) -> str:
    """As JSON. The templates write Python's None."""
    if value is None:
        return '("null" | "None")'
    return text(json.dumps(value))


def _head(name: str) -> str:
    return text(f"call:{name}{{")


def _format(opening: str, closing: str, quote: str, **facts: Any) -> ToolFormat:
    """One call between two control tokens. A third one quotes its texts."""

    def triggers(template: str, tools: NamedSchemas) -> Triggers:
        if not all(_NAME.fullmatch(name) for name, _ in tools):
            raise NotConstrainableError("this tool-call format can't express some name")
        grammar = listed_calls(tools, _spelling(quote), _head, text("}"))
        return {opening: GrammarTrigger("", grammar, closing, again=True)}

    return ToolFormat(
        signs=(opening,),
        markers=(opening,),
        control=True,
        named_tokens=True,
        reader=read_block(closing, _GemmaReader(quote).calls),
        triggers=triggers,
        **facts,
    )


FORMATS = (
    _format("<start_function_call>", "<end_function_call>", "<escape>", name="function_gemma"),
    _format(
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        name="gemma4",
        # A channel opened twice counts as one. Results are not the model's to write.
        drops=("<channel|>", "<|channel>", TurnEnd("<|tool_response>")),
        think=("<|channel>thought", "<channel|>"),
    ),
)
