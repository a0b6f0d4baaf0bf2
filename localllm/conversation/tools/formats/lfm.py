"""LFM2: Python calls in a list, `<|tool_call_start|>[f(city="Paris", days=2)]<|tool_call_end|>`."""

from __future__ import annotations

import re

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
from localllm.conversation.tools.readers import Call, as_json, json_calls, read_block
from localllm.conversation.tools.schemas import parameters
from localllm.conversation.tools.values import python_values

_OPEN = "<|tool_call_start|>"
_CLOSE = "<|tool_call_end|>"
# The characters allowed in a name, keywords included.
_WORD = r"[^\s()\[\]=,\"']+"
_NAME = re.compile(_WORD)
_HEAD = re.compile(rf"[\s,]*({_WORD})\(")
_KEY = re.compile(rf"[\s,]*({_WORD})\s*=\s*")


# As its template writes them: a text may span several lines. Parameters are identified by name, so
# any order is allowed.
_VALUES = python_values(r"'([^'\\]|\\(?s:.))*'", any_order=True)


def _parse(block: str) -> list[Call] | None:
    try:
        calls = _listed(block.strip())
    except (ValueError, RecursionError):
        calls = None
    if calls is not None:
        return calls
    return json_calls(block)


def _listed(block: str) -> list[Call] | None:
    """Calls whose values are Python or JSON literals.

    Names may be Python keywords. `true` is a value, not a name.
    """
    if not block.startswith("["):
        block = f"[{block}]"  # the model sometimes omits the brackets
    calls: list[Call] = []
    at = 1
    while (head := _HEAD.match(block, at)) is not None:
        values: dict[str, object] = {}
        at = head.end()
        while (key := _KEY.match(block, at)) is not None:
            values[key[1]], at = LiteralReader().value(block, key.end())
        if not block.startswith(")", at):
            return None
        at += 1
        calls.append((head[1], as_json(values)))
    if calls and block[at:].strip() == "]":
        return calls
    return None


def _head(name: str) -> str:
    return text(f"{name}(")


def _before(key: str | None) -> str:
    if key is None:
        return f'/{_WORD}/ "="'
    return text(f"{key}=")


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    words: list[str] = []
    for name, schema in tools:
        words.append(name)
        words += [key for key, _, _ in parameters(schema)]
    if not all(_NAME.fullmatch(word) for word in words):
        raise NotConstrainableError("this tool-call format can't express some name")
    lark = listed_calls(
        tools,
        _VALUES,
        _head,
        text(")"),
        before=_before,
        start='"[" call (", " call)* "]"',
    )
    return {_OPEN: GrammarTrigger("", lark, _CLOSE)}


FORMATS = (
    ToolFormat(
        name="lfm",
        # Instruct templates contain only the offer; the model writes the calls itself.
        signs=(_OPEN, "<|tool_list_start|>", "List of tools: ["),
        ambiguity=1,
        markers=(_OPEN,),
        calls_in_reasoning=True,
        control=True,
        named_tokens=True,
        reader=read_block(_CLOSE, _parse),
        triggers=_triggers,
    ),
)
