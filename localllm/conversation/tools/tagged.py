"""Reading calls whose parameters stand between tags, one parameter after the other and nothing else among them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.conversation.tools.base import Tool, parameters_of
from localllm.conversation.tools.readers import Call, as_json

_JSON_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    dict: ("object",),
    list: ("array",),
    type(None): ("null",),
}


def tagged(body: str, opening: re.Pattern[str], closing: str, *, ended: bool) -> list[tuple[re.Match[str], str]] | None:
    """Each parameter's opening in `body` and its value; None where anything else stands there. A closing tag the model
    forgot is made up for by the next opening, or by the end of `body` where its own tag came (`ended`)."""
    found: list[tuple[re.Match[str], str]] = []
    at = 0
    while at < len(body) and not body[at:].isspace():
        head = opening.match(body, at)
        if head is None:
            return None
        following = opening.search(body, head.end())
        end = _end_of_value(body, head.end(), opening, closing)
        if following is not None and (end < 0 or following.start() < end):
            found.append((head, body[head.end() : following.start()]))
            at = following.start()
        elif end >= 0:
            found.append((head, body[head.end() : end]))
            at = end + len(closing)
        elif ended:
            found.append((head, body[head.end() :]))
            break
        else:
            return None
    return found


def _end_of_value(body: str, at: int, opening: re.Pattern[str], closing: str) -> int:
    """The first closing tag behind which a parameter or nothing stands: a value may hold the tag itself."""
    first = end = body.find(closing, at)
    while end >= 0:
        behind = end + len(closing)
        if opening.match(body, behind) or not body[behind:].strip():
            return end
        end = body.find(closing, behind)
    return first


def functions(block: str, opening: re.Pattern[str], closing: str) -> list[tuple[re.Match[str], str, bool]] | None:
    """Each function's opening in `block`, its body and whether its closing tag came; None where anything else stands
    outside them."""
    found: list[tuple[re.Match[str], str, bool]] = []
    at = 0
    while at < len(block) and not block[at:].isspace():
        head = opening.match(block, at)
        if head is None:
            return None
        end = block.find(closing, head.end())
        found.append((head, block[head.end() : len(block) if end < 0 else end], end >= 0))
        at = len(block) if end < 0 else end + len(closing)
    return found


def in_tags(
    block: str,
    tools: Sequence[Tool],
    function: tuple[re.Pattern[str], str],
    parameter: tuple[re.Pattern[str], str],
) -> list[Call] | None:
    """The calls of `block`: opening (its first group the name) and closing of a function and of a parameter. None where
    it can't be read whole: half of a call is none."""
    found = functions(block, *function)
    if found is None:
        return None
    calls: list[Call] = []
    for head, body, ended in found:
        values = tagged(body, *parameter, ended=ended)
        if values is None:
            return None
        name = head[1]
        calls.append((name, as_json({m[1]: typed(unwrapped(v), m[1], name, tools) for m, v in values})))
    return calls or None


def unwrapped(value: str) -> str:
    """A value without the newlines that a template puts around it, if it does."""
    return value[1:].removesuffix("\n") if value.startswith("\n") else value


def typed(value: str, name: str, function: str, tools: Sequence[Tool]) -> Any:
    """A parameter's text as the type its schema says. Where text is one of several types, only what reads as one of
    the others is not text."""
    schema = next((t for t in map(parameters_of, tools) if t[0] == function), ("", {}))[1]
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return as_kind(value, kinds_of(described))


def as_kind(value: str, kinds: set[str]) -> Any:
    """`value` read as JSON of one of `kinds` (none: of any), or as it is."""
    if kinds == {"string"}:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if "string" in kinds and not kinds.intersection(_JSON_KINDS.get(type(read), ())):
        return value
    return read


def kinds_of(described: Any) -> set[str]:
    """The JSON types a schema names; empty where it names none."""
    if not isinstance(described, Mapping):
        return set()
    kind = described.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {k for k in kind if isinstance(k, str)}
    options = [described["const"]] if "const" in described else described.get("enum")
    if isinstance(options, list):
        return {"string" if isinstance(o, str) else _JSON_KINDS.get(type(o), ("object",))[0] for o in options}
    either = described.get("anyOf") or described.get("oneOf")
    return set().union(*map(kinds_of, either)) if isinstance(either, list) else set()
