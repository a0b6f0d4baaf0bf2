"""MiniMax M3: tags that begin with a separator token, one per parameter.

Members and `<item>`s are tags inside a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
    parameters_of,
)
from localllm.conversation.tools.call_grammars import listed_calls
from localllm.conversation.tools.lark import text
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.schemas import kinds_of, options_of
from localllm.conversation.tools.tag_reader import as_kind
from localllm.conversation.tools.values import ANYTHING, Spelling

_MARK = "]<]minimax[>["
_OPEN = f"{_MARK}<tool_call>"
_CLOSE = f"{_MARK}</tool_call>"
_INVOKE = re.compile(r'\s*\]<\]minimax\[>\[<invoke name="([^"]+)">')
_INVOKE_END = f"{_MARK}</invoke>"
_TAG = re.compile(r"\s*\]<\]minimax\[>\[<([^<>/\s]+)>")
_MAX_NESTED = 32


def _lark(literal: str) -> str:
    """Lark of `literal`, with every separator as its own string.

    The tag that a separator opens is known only from the text after it.
    """
    return " ".join(text(part) for part in re.split(f"({re.escape(_MARK)})", literal) if part)


def _member(key: str, value: str, rule: Callable[[str], str]) -> str:
    """The Lark of a member.

    A value without a known type extends to its own closing tag, because no rule can separate tags
    from text.
    """
    if value != ANYTHING:
        return f"{_lark(f'{_MARK}<{key}>')} {value} {text(f'</{key}>')}"
    end = text(f"{_MARK}</{key}>")
    return f"{_lark(f'{_MARK}<{key}>')} {rule(f'[suffix={end}]: /(?s:.*)/')}"


def _this_text(literal: str) -> str:
    return text(literal + _MARK)


def _any_member(value: str) -> str:
    name = r"/[^<>\/\s]+/"
    return f'{_lark(_MARK + "<")} {name} ">" {_or_text(value)} "</" {name} ">"'


def _item(value: str) -> str:
    return f"{_lark(f'{_MARK}<item>')} {_or_text(value)} {text('</item>')}"


def _truth(value: bool | None) -> str:
    """As JSON. The template writes null as an empty value."""
    if value is None:
        return f"{text('null')}? {text(_MARK)}"
    return f"{text(json.dumps(value))} {text(_MARK)}"


# Every value extends to the separator before its closing tag.
_SPELLING = Spelling(
    any_text="v_text",
    rules=(f"v_text[suffix={text(_MARK)}]: /(?s:.*)/",),
    this_text=_this_text,
    member=_member,
    any_member=_any_member,
    item=_item,
    truth=_truth,
    closed=text(_MARK),
    comma="",
    brackets=("", _MARK),
    braces=("", _MARK),
    any_order=True,
    has_any=False,
)


def _or_text(value: str) -> str:
    if value == ANYTHING:
        return "v_text"
    return value


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    calls: list[Call] = []
    at = 0
    while (head := _INVOKE.match(block, at)) is not None:
        end = block.find(_INVOKE_END, head.end())
        if end < 0:
            return None
        schema = next((s for n, s in map(parameters_of, tools) if n == head[1]), {})
        values = _members(block[head.end() : end], schema, schema, 0)
        if values is None:
            return None
        calls.append((head[1], as_json(dict(values))))
        at = end + len(_INVOKE_END)
    if block[at:].strip():
        return None
    return calls or None


def _members(
    body: str, schema: Any, root: Mapping[str, Any], depth: int
) -> list[tuple[str, Any]] | None:
    """The tags in `body` and their values, or None if it contains anything else."""
    found: list[tuple[str, Any]] = []
    at = 0
    while at < len(body) and not body[at:].isspace():
        head = _TAG.match(body, at)
        if head is None or depth > _MAX_NESTED:
            return None
        name = head[1]
        end = _closing(body, head.end(), name)
        if end < 0:
            return None
        described = _described(schema, name, root)
        found.append((name, _value(body[head.end() : end], described, root, depth + 1)))
        at = end + len(f"{_MARK}</{name}>")
    return found


def _closing(body: str, at: int, name: str) -> int:
    """The index of the closing tag for `name`, skipping nested tags of the same name; -1 if
    missing.

    `at` is the index after the opening tag.
    """
    depth = 1
    for tag in re.finditer(re.escape(_MARK) + rf"<(/?){re.escape(name)}>", body[at:]):
        depth += -1 if tag[1] else 1
        if not depth:
            return at + tag.start()
    return -1


def _value(text: str, schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """A value in the type that its schema wants. If text is allowed, tags inside it are text."""
    kinds = kinds_of(schema, root)
    if not text.strip():
        return _empty(text, kinds)
    members = None
    if _TAG.match(text) and "string" not in kinds:
        members = _members(text, schema, root, depth)
    if not members:
        return as_kind(text, kinds)
    if all(name == "item" for name, _ in members) and kinds != {"object"}:
        return [value for _, value in members]
    return dict(members)


def _empty(text: str, kinds: set[str]) -> Any:
    """The value of one of `kinds` that is written as an empty text."""
    if "null" in kinds and "string" not in kinds:
        return None
    if kinds == {"array"}:
        return []
    if kinds == {"object"}:
        return {}
    return as_kind(text, kinds)


def _described(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """The schema of a member `name` or of an array's item, from the first alternative that has
    it."""
    options = options_of(schema, root)
    if not options:
        options = [schema] if isinstance(schema, Mapping) else []
    for option in options:
        properties = option.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if name == "item" and "items" in option:
            return option["items"]
    return None


def _reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
    def parse(block: str) -> list[Call] | None:
        return _parse(tools, block)

    return BlockReader(first, marker, _CLOSE, parse)


def _head(name: str) -> str:
    return _lark(f'{_MARK}<invoke name="{name}">')


def _triggers(template: str, tools: NamedSchemas) -> Triggers:
    end = _lark(f"{_INVOKE_END}\n")
    calls = listed_calls(tools, _SPELLING, _head, end, start=f"call+ {_lark(_CLOSE)}")
    return {_OPEN: GrammarTrigger("\n", calls)}


FORMATS = (
    ToolFormat(
        name="minimax_m3",
        signs=(_MARK,),
        markers=(_OPEN,),
        control=True,
        # A reply without reasoning begins with the closing tag.
        drops=("</mm:think>",),
        think=("<mm:think>", "</mm:think>"),
        reader=_reader,
        triggers=_triggers,
    ),
)
