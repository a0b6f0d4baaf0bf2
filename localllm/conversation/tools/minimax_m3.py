"""MiniMax M3: tags behind a separator token, one per parameter, with members and `<item>`s as tags inside a value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from localllm.conversation.tools.base import FreeFormat, Tool, parameters_of
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.tagged import as_kind, functions, kinds_of

_MARK = "]<]minimax[>["
_OPEN, _CLOSE = f"{_MARK}<tool_call>", f"{_MARK}</tool_call>"
_INVOKE = re.compile(r'\s*\]<\]minimax\[>\[<invoke name="([^"]+)">')
_TAG = re.compile(r"\s*\]<\]minimax\[>\[<([^<>/\s]+)>")
_MOST_NESTED = 32


def _parse(tools: Sequence[Tool], block: str) -> list[Call] | None:
    calls: list[Call] = []
    for head, body, ended in functions(block, _INVOKE, f"{_MARK}</invoke>") or ():
        schema = next((s for n, s in map(parameters_of, tools) if n == head[1]), {})
        values = _members(body, schema, 0) if ended else None
        if values is None:
            return None
        calls.append((head[1], as_json(dict(values))))
    return calls or None


def _members(body: str, schema: Any, depth: int) -> list[tuple[str, Any]] | None:
    """The tags `body` consists of and their values; None where it is anything else."""
    found: list[tuple[str, Any]] = []
    at = 0
    while at < len(body) and not body[at:].isspace():
        head = _TAG.match(body, at)
        closing = f"{_MARK}</{head[1]}>" if head is not None else ""
        end = _closing(body, head.end(), head[1]) if head is not None else -1
        if head is None or end < 0 or depth > _MOST_NESTED:
            return None
        found.append((head[1], _value(body[head.end() : end], _described(schema, head[1]), depth + 1)))
        at = end + len(closing)
    return found


def _closing(body: str, at: int, name: str) -> int:
    """Where the tag `name` that was opened before `at` closes, past others of its name inside."""
    depth = 1
    for tag in re.finditer(re.escape(_MARK) + rf"<(/?){re.escape(name)}>", body[at:]):
        depth += -1 if tag[1] else 1
        if not depth:
            return at + tag.start()
    return -1


def _value(text: str, schema: Any, depth: int) -> Any:
    """A value as its schema wants it: where text will do, tags inside are text."""
    kinds = kinds_of(schema)
    members = _members(text, schema, depth) if _TAG.match(text) and "string" not in kinds else None
    if not members:
        empty: Any = {"array": [], "object": {}}.get(next(iter(kinds))) if len(kinds) == 1 else None
        return empty if empty is not None and not text.strip() else as_kind(text, kinds)
    if all(name == "item" for name, _ in members) and kinds != {"object"}:
        return [value for _, value in members]
    return dict(members)


def _described(schema: Any, name: str) -> Any:
    """The schema of a member `name`, or of an array's item, in whichever alternative has it."""
    if not isinstance(schema, Mapping):
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    if name == "item" and "items" in schema:
        return schema["items"]
    for way in ("anyOf", "oneOf"):
        for option in schema.get(way) or ():
            found = _described(option, name)
            if found is not None:
                return found
    return None


class MiniMaxM3(FreeFormat):
    """All calls in one block."""

    name = "minimax_m3"
    signs = (_MARK,)
    markers = (_OPEN,)
    control = True
    # A reply without a thought begins with the end of one.
    drops = ("</mm:think>",)
    think = ("<mm:think>", "</mm:think>")

    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        """Reads the block up to its closing tag."""
        return BlockReader(first, marker, _CLOSE, partial(_parse, tools))


FORMAT = MiniMaxM3()
