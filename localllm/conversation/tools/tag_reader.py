"""Reading calls whose parameters stand between tags, one parameter after the other and nothing else
among them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.tools.base import (
    GrammarTrigger,
    NamedSchemas,
    Tool,
    ToolFormat,
    Triggers,
    parameters_of,
)
from localllm.conversation.tools.call_grammars import TagGrammar, tagged_calls
from localllm.conversation.tools.literals import literal
from localllm.conversation.tools.readers import BlockReader, Call, as_json
from localllm.conversation.tools.schemas import kind_of, kinds_of, parameters

RawParameter: TypeAlias = tuple[re.Match[str], str]
"""A parameter's opening and its value."""
Parse: TypeAlias = Callable[[str], list[Call] | None]


@dataclass(frozen=True, slots=True)
class TagPatterns:
    """How calls with tagged parameters are recognised: opening and closing of a function (no
    closing: it lasts to the end) and of a parameter. Names are the first groups of the openings.
    `wrapped`: a value stands on lines of its own.
    `is_json`: whether a parameter's opening says itself that its value is JSON, and not text (None:
    its schema says it)."""

    function: re.Pattern[str]
    function_end: str
    parameter: re.Pattern[str]
    parameter_end: str
    wrapped: bool = False
    is_json: Callable[[re.Match[str]], bool] | None = None


class _OpenError(Exception):
    """A value is not closed."""


def tagged_format(
    *,
    patterns: TagPatterns,
    grammar: TagGrammar,
    markers: tuple[str, ...],
    calls: Callable[[str, Sequence[Tool], TagPatterns], list[Call] | None] | None = None,
    closing: str = "",
    lead: str = "",
    one_block: bool = False,
    **facts: Any,
) -> ToolFormat:
    """A format of calls with tagged parameters up to `closing` (default: the closing tag of the
    marker that opened them); `calls` reads those of a block, None where it can't be read whole.
    `one_block`: a block, which begins with `lead`, holds every call; else each call has a block of
    its own. `facts` are ToolFormat's."""

    def end_of(marker: str) -> str:
        return closing or marker.replace("<", "</")

    def reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        return BlockReader(
            first,
            marker,
            end_of(marker),
            lambda block: (calls or typed_calls)(block, tools, patterns),
            is_open=lambda block: is_open(block, patterns),
        )

    def triggers(template: str, tools: NamedSchemas) -> Triggers:
        if not one_block:
            call = tagged_calls(tools, grammar)
            return {marker: GrammarTrigger(lead, call, again=True) for marker in markers}
        blocks = {m: tagged_calls(tools, grammar, repeat=True, closing=end_of(m)) for m in markers}
        return {marker: GrammarTrigger(lead, block) for marker, block in blocks.items()}

    return ToolFormat(markers=markers, reader=reader, triggers=triggers, **facts)


def typed_calls(block: str, tools: Sequence[Tool], tags: TagPatterns) -> list[Call] | None:
    """The calls of `block` with values as their openings or their schemas say."""

    def valued(function: re.Match[str], pairs: list[RawParameter]) -> dict[str, Any]:
        name, is_json = function[1], tags.is_json
        if is_json is not None:
            return {m[1]: json.loads(v) if is_json(m) else v for m, v in pairs}
        if tags.wrapped:  # by a template's own newlines, if by any
            pairs = [(m, v[1:].removesuffix("\n") if v[:1] == "\n" else v) for m, v in pairs]
        return {m[1]: typed(v, m[1], name, tools) for m, v in pairs}

    return read_calls(block, tools, tags, valued)


def read_calls(
    block: str,
    tools: Sequence[Tool],
    tags: TagPatterns,
    valued: Callable[[re.Match[str], list[RawParameter]], dict[str, Any]],
) -> list[Call] | None:
    """The calls of `block`, whose arguments `valued` makes of a function's opening and its
    parameters. None where it can't be read whole: half of a call is none."""
    try:
        found = _functions(block, tools, tags, strict=False)
        calls = [(head[1], as_json(valued(head, pairs))) for head, pairs in found or ()]
    except (ValueError, RecursionError, _OpenError):
        return None
    return calls or None


def is_open(block: str, tags: TagPatterns) -> bool:
    """True where `block` ends within a value."""
    try:
        _functions(block, (), tags, strict=True)
    except _OpenError:
        return True
    return False


def _functions(
    block: str, tools: Sequence[Tool], tags: TagPatterns, *, strict: bool
) -> list[tuple[re.Match[str], list[RawParameter]]] | None:
    """Each function's opening and parameters; None where anything else stands in `block`. A closing
    tag that the model forgot is made up for where the next tag stands; `strict` raises _OpenError
    there."""
    found: list[tuple[re.Match[str], list[RawParameter]]] = []
    at = 0
    while at < len(block) and not block[at:].isspace():
        function = tags.function.match(block, at)
        if function is None:
            return None
        pairs: list[RawParameter] = []
        at = function.end()
        names = _names(function[1], tools)
        while (parameter := tags.parameter.match(block, at)) is not None:
            end, at = _end_of_value(
                block, parameter, tags, names - {m[1] for m, _ in pairs}, strict
            )
            pairs.append((parameter, block[parameter.end() : end]))
        behind = len(block) - len(block[at:].lstrip())
        if tags.function_end and block.startswith(tags.function_end, behind):
            at = behind + len(tags.function_end)
        elif behind < len(block):
            return None
        else:
            at = behind
        found.append((function, pairs))
    return found


def _names(function: str, tools: Sequence[Tool]) -> frozenset[str]:
    schema = next((s for n, s in map(parameters_of, tools) if n == function), {})
    return frozenset(name for name, _, _ in parameters(schema))


def _end_of_value(
    block: str, parameter: re.Match[str], tags: TagPatterns, names: frozenset[str], strict: bool
) -> tuple[int, int]:
    """Where the value that `parameter` opened ends, and where its closing tag does. A value may
    hold the tag itself: it ends where a parameter, the function's end or nothing stands behind
    it."""
    at = parameter.end()
    forgotten = _forgotten(block, parameter, tags, names)
    end = block.find(tags.parameter_end, at)
    while end >= 0 and (forgotten is None or end < forgotten):
        behind = end + len(tags.parameter_end)
        if _tag_follows(block, behind, tags, strict):
            return end, behind
        end = block.find(tags.parameter_end, behind)
    if strict:
        raise _OpenError
    if forgotten is None:
        last = block.rfind(tags.function_end, at) if tags.function_end else len(block)
        if last < 0:
            raise _OpenError
        forgotten = last
    return forgotten, forgotten


def _forgotten(
    block: str, parameter: re.Match[str], tags: TagPatterns, names: frozenset[str]
) -> int | None:
    """Where a parameter begins whose predecessor was not closed: at a line's start, and one that
    the function has."""
    for following in tags.parameter.finditer(block, parameter.end()):
        known = following[1] in names and following[1] != parameter[1]
        closed = tags.parameter_end in block[parameter.end() : following.start()]
        if (
            known
            and not closed
            and "\n" in following[0][: len(following[0]) - len(following[0].lstrip())]
        ):
            return following.start()
    return None


def _tag_follows(block: str, at: int, tags: TagPatterns, strict: bool) -> bool:
    rest = block[at:].lstrip()
    if not rest:
        return not (strict and tags.function_end)
    if tags.parameter.match(block, at) is not None:
        return True
    return bool(tags.function_end) and rest.startswith(tags.function_end)


def typed(value: str, name: str, function: str, tools: Sequence[Tool]) -> Any:
    """A parameter's text as the type its schema says. Where text is one of several types, only what
    reads as one of the others is not text."""
    schema = next((t for t in map(parameters_of, tools) if t[0] == function), ("", {}))[1]
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return as_kind(value, kinds_of(described, schema))


def as_kind(value: str, kinds: set[str]) -> Any:
    """`value` read as one of `kinds` (none: as JSON of any), or as it is."""
    if kinds == {"string"}:
        return value
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return _in_python(value, kinds)
    wanted = kinds | ({"integer"} if "number" in kinds else set())
    return value if "string" in kinds and kind_of(read) not in wanted else read


def _in_python(value: str, kinds: set[str]) -> Any:
    """What some templates write for truths, nulls and lists."""
    try:
        read = literal(value)
    except (ValueError, RecursionError):
        return value
    return read if kind_of(read) in kinds - {"string"} else value
