"""Gemma: `call:f{city:<|"|>Paris<|"|>,days:[1,2]}`, JSON with a control token as a text's quotes and none around keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from localllm.conversation.reply import TurnEnd
from localllm.conversation.tools.base import GrammarTrigger, NamedSchemas, NotConstrainableError, Tool, ToolFormat
from localllm.conversation.tools.call_grammars import ListGrammar, listed_calls
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.values import QuotedValues

_CALL = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_BARE_TEXT = re.compile(r"[^,:{}\[\]<]+")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[\w.-]+")


def _calls_in(quote: str) -> Callable[[str], list[Call] | None]:
    """A parser of one call's block in Gemma's notation: JSON without quotes around keys, and `quote` around texts."""

    def parse(block: str) -> list[Call] | None:
        match = _CALL.match(block)
        if match is None:
            return None
        try:
            values, at = _read_value(block, match.end(), quote)
        except (ValueError, RecursionError):
            return None
        if block[at:].strip():
            return None
        return [(match[1], as_json(values))]

    return parse


def _read_value(block: str, at: int, quote: str) -> tuple[object, int]:
    """The value at `at` and where it ends. Raises ValueError where there is none."""
    at = _behind_space(block, at)
    if block.startswith(quote, at):
        end = block.index(quote, at + len(quote))
        return block[at + len(quote) : end], end + len(quote)
    if block.startswith("{", at):
        members: dict[str, object] = {}
        at = _behind_space(block, at + 1)
        while not block.startswith("}", at):
            key, at = _read_key(block, at, quote)
            members[key], at = _read_value(block, at, quote)
            at = _behind_comma(block, at, "}")
        return members, at + 1
    if block.startswith("[", at):
        items: list[object] = []
        at = _behind_space(block, at + 1)
        while not block.startswith("]", at):
            item, at = _read_value(block, at, quote)
            items.append(item)
            at = _behind_comma(block, at, "]")
        return items, at + 1
    bare = _BARE_TEXT.match(block, at)
    if bare is None:
        raise ValueError
    text = bare[0].strip()
    if text == "None":
        return None, bare.end()
    try:
        return json.loads(text), bare.end()
    except ValueError:
        return text, bare.end()


def _read_key(block: str, at: int, quote: str) -> tuple[str, int]:
    if block.startswith(quote, at):
        end = block.index(quote, at + len(quote))
        key, at = block[at + len(quote) : end], end + len(quote)
    else:
        bare = _BARE_TEXT.match(block, at)
        if bare is None:
            raise ValueError
        key, at = bare[0].strip(), bare.end()
    at = _behind_space(block, at)
    if not block.startswith(":", at):
        raise ValueError
    return key, at + 1


def _behind_comma(block: str, at: int, close: str) -> int:
    at = _behind_space(block, at)
    if block.startswith(",", at):
        return _behind_space(block, at + 1)
    if not block.startswith(close, at):
        raise ValueError
    return at


def _behind_space(block: str, at: int) -> int:
    match = _SPACE.match(block, at)
    return match.end() if match is not None else at


class FunctionGemma(ToolFormat):
    """One call between two control tokens; a third one stands for the quotes of its texts."""

    name = "function_gemma"
    markers: ClassVar[tuple[str, ...]] = ("<start_function_call>",)
    signs = markers
    control = True
    named_tokens = True
    closing: ClassVar[str] = "<end_function_call>"
    quote: ClassVar[str] = "<escape>"

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return BlockReader(first, marker, self.closing, _calls_in(self.quote))

    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        if not all(_NAME.fullmatch(name) for name, _ in tools):
            raise NotConstrainableError("this notation has no way to write some name")
        call = ListGrammar(head=lambda name: f"call:{name}{{", end="}")
        grammar = listed_calls(tools, call, QuotedValues(self.quote, _NAME.pattern))
        return {self.markers[0]: GrammarTrigger("", grammar, self.closing, again=True)}


class Gemma4(FunctionGemma):
    """The same with other tokens, and thoughts in a channel before the call."""

    name = "gemma4"
    markers = ("<|tool_call>",)
    signs = markers
    closing = "<tool_call|>"
    quote = '<|"|>'
    # A channel opened twice is one. A result is for somebody else to write.
    drops = ("<channel|>", "<|channel>", TurnEnd("<|tool_response>"))
    think = ("<|channel>thought", "<channel|>")


FORMATS = (FunctionGemma(), Gemma4())
