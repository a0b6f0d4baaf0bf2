"""Reads calls whose parameters are between tags, one after the other, without other text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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
    """How calls with tagged parameters are recognised.

    - `function`, `parameter`: patterns of the opening tags. The first group is the name.
    - `function_end`, `parameter_end`: the closing tags. If `function_end` is "", a function extends
      to the end.
    - `wrapped`: a value is on its own lines.
    - `is_json`: returns True if a parameter's opening marks its value as JSON, False for text.
      None: the schema decides.
    - `quoted`: the pattern of a quoted value. The first group is the literal text.
    """

    function: re.Pattern[str]
    function_end: str
    parameter: re.Pattern[str]
    parameter_end: str
    wrapped: bool = False
    is_json: Callable[[re.Match[str]], bool] | None = None
    quoted: re.Pattern[str] | None = None


class _OpenError(Exception):
    """A value is not closed."""


def tagged_format(
    *,
    patterns: TagPatterns,
    grammar: TagGrammar,
    markers: tuple[str, ...],
    closing: str = "",
    lead: str = "",
    one_block: bool = False,
    **fields: Any,
) -> ToolFormat:
    """A format of calls with tagged parameters up to `closing`.

    The default of `closing` is the closing tag of the marker. If `one_block`, one block holds all
    calls and begins with `lead`; else each call has its own block. `fields` are ToolFormat's
    fields.
    """

    def end_of(marker: str) -> str:
        return closing or marker.replace("<", "</")

    def ends_in_a_value(block: str) -> bool:
        return is_open(block, patterns)

    def reader(first: int, marker: str, tools: Sequence[Tool]) -> BlockReader:
        def parse(block: str) -> list[Call] | None:
            return typed_calls(block, tools, patterns)

        return BlockReader(first, marker, end_of(marker), parse, is_open=ends_in_a_value)

    def triggers(template: str, tools: NamedSchemas) -> Triggers:
        if not one_block:
            call = tagged_calls(tools, grammar)
            return {marker: GrammarTrigger(lead, call, again=True) for marker in markers}
        blocks = {
            marker: tagged_calls(tools, grammar, repeat=True, closing=end_of(marker))
            for marker in markers
        }
        return {marker: GrammarTrigger(lead, block) for marker, block in blocks.items()}

    return ToolFormat(markers=markers, reader=reader, triggers=triggers, **fields)


def typed_calls(block: str, tools: Sequence[Tool], tags: TagPatterns) -> list[Call] | None:
    """The calls of `block`, with values typed by their openings or by their schemas.

    None if the block can't be read completely: a partial call is not reported.
    """
    try:
        functions = _functions(block, tools, tags, strict=False) or ()
        calls = [
            (head[1], as_json(_arguments(head[1], pairs, tools, tags))) for head, pairs in functions
        ]
    except (ValueError, RecursionError, _OpenError):
        return None
    return calls or None


def _arguments(
    function: str, pairs: Sequence[RawParameter], tools: Sequence[Tool], tags: TagPatterns
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for opening, value in pairs:
        values[opening[1]] = _argument(opening, value, function, tools, tags)
    return values


def _argument(
    opening: re.Match[str], text: str, function: str, tools: Sequence[Tool], tags: TagPatterns
) -> Any:
    """The value of one parameter, from the `text` that the model wrote."""
    if tags.quoted is not None:
        quoted = tags.quoted.match(text)
        if quoted is not None:
            return quoted[1]
    if tags.is_json is not None:
        return json.loads(text) if tags.is_json(opening) else text
    if tags.wrapped and text[:1] == "\n":  # newlines added by the template
        text = text[1:].removesuffix("\n")
    return typed(text, opening[1], function, tools)


def is_open(block: str, tags: TagPatterns) -> bool:
    """True if `block` ends within a value."""
    try:
        _functions(block, (), tags, strict=True)
    except _OpenError:
        return True
    return False


def _functions(
    block: str, tools: Sequence[Tool], tags: TagPatterns, *, strict: bool
) -> list[tuple[re.Match[str], list[RawParameter]]] | None:
    """Each function's opening and parameters, or None if `block` contains anything else.

    If the model forgot a closing tag, the value ends at the next tag; with `strict`, _OpenError is
    raised instead.
    """
    functions: list[tuple[re.Match[str], list[RawParameter]]] = []
    position = 0
    while position < len(block) and not block[position:].isspace():
        function = tags.function.match(block, position)
        if function is None:
            return None
        pairs: list[RawParameter] = []
        position = function.end()
        schema = next(
            (schema for name, schema in map(parameters_of, tools) if name == function[1]), {}
        )
        names = {name for name, _, _ in parameters(schema)}
        while (parameter := tags.parameter.match(block, position)) is not None:
            names.discard(parameter[1])
            end, position = _end_of_value(block, parameter.end(), tags, names, strict)
            pairs.append((parameter, block[parameter.end() : end]))
        position = len(block) - len(block[position:].lstrip())
        if tags.function_end and block.startswith(tags.function_end, position):
            position += len(tags.function_end)
        elif position < len(block):
            return None
        functions.append((function, pairs))
    return functions


def _end_of_value(
    block: str, start: int, tags: TagPatterns, names: set[str], strict: bool
) -> tuple[int, int]:
    """The end of the value that begins at `start`, and the end of its closing tag.

    A value may contain the closing tag. So the value ends only at a closing tag before another
    parameter, the function's end, or the end of the block. An unclosed value ends before the next
    parameter of `names` that starts on a new line.
    """
    first_close = block.find(tags.parameter_end, start)
    if first_close < 0:
        first_close = len(block)
    for parameter in tags.parameter.finditer(block, start, first_close):
        if parameter[1] in names and re.match(r"\s*\n", parameter[0]):
            return parameter.start(), parameter.start()
    for closing in re.compile(re.escape(tags.parameter_end)).finditer(block, start):
        if _tag_follows(block, closing.end(), tags, strict):
            return closing.span()
    last_close = len(block)
    if tags.function_end:
        last_close = block.rfind(tags.function_end, start)
    if strict or last_close < 0:
        raise _OpenError
    return last_close, last_close


def _tag_follows(block: str, position: int, tags: TagPatterns, strict: bool) -> bool:
    remaining = block[position:].lstrip()
    if not remaining:
        return not (strict and tags.function_end)
    function_ends = bool(tags.function_end) and remaining.startswith(tags.function_end)
    return function_ends or tags.parameter.match(block, position) is not None


def typed(value: str, name: str, function: str, tools: Sequence[Tool]) -> Any:
    """A parameter's text converted to the type in its schema.

    If text is one of several types, the value stays text unless it reads as one of the others.
    """
    schemas = dict(map(parameters_of, tools))
    schema = schemas.get(function, {})
    described = next((part for key, part, _ in parameters(schema) if key == name), None)
    return as_kind(value, kinds_of(described, schema))


def as_kind(value: str, kinds: set[str]) -> Any:
    """`value` read as one of `kinds` (empty: any JSON type), or unchanged."""
    if kinds == {"string"}:
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return _python_value(value, kinds)
    kind = kind_of(parsed)
    if kind == "integer" and "number" in kinds:
        return parsed
    if "string" in kinds and kind not in kinds:
        return value
    return parsed


def _python_value(value: str, kinds: set[str]) -> Any:
    """Read Python literals, which some templates write for booleans, null and lists."""
    try:
        parsed = literal(value)
    except (ValueError, RecursionError):
        return value
    if kind_of(parsed) in kinds - {"string"}:
        return parsed
    return value
