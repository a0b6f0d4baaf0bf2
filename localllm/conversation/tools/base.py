"""What a tool-call format is. Everything about one way of writing calls stands in that notation's
own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.reply import CallReader, Drop
from localllm.errors import UnsupportedError
from localllm.grammars.trigger import GrammarTrigger as GrammarTrigger

Tool: TypeAlias = Mapping[str, Any]
"""A function as clients offer it: `{"type": "function", "function": {"name": …, "parameters": …}}`.
A schema under `call_schema` is what its calls must match, where that is more than the model is
shown."""
NamedSchemas: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Functions: name and the JSON schema of the parameters."""
Grammar: TypeAlias = tuple[str, str]
"""A kind of grammar the engine knows and its source."""


class NotConstrainableError(UnsupportedError, code="not_constrainable"):
    """A format's grammar can't spell some name or value. Its calls are then read as the model
    writes them."""


Reader: TypeAlias = Callable[[int, str, Sequence[Tool]], CallReader]
"""Makes a reader of the calls behind a marker, the first of which is the reply's call of that
number, to one of the tools."""
Triggers: TypeAlias = dict[str, GrammarTrigger]
"""Openings of calls and what may follow them, the first of a reply before those of further
calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way models write calls: how it is detected, how it is read, and the grammar that
    constrains a call to its schema.

    `signs`: a template that contains one of them writes this format; formats whose signs stand in
    other formats' templates too have an `ambiguity`, and those with a higher one are tested later.
    `markers` open a call, and `reader` reads what follows them.
    `triggers` of a template and the functions that may be called; raises NotConstrainableError
    where the grammar can't write what some tool asks for.
    `control`: the markers are control tokens, which the engine must render.
    `named_tokens`: every marker, inner ones too, is a control token between < and >, which a
    grammar asks for by name.
    `drops`: structure that is neither answer nor call.
    `opening` wraps a forced call (JSON with `name` and `arguments_key`) up to its `{`; None means
    that forced calls use the default.
    `think`: the reasoning's markers, where the format itself has them;
    `may_think`: those of models that write it and reason, whose templates mention them.
    `calls_in_reasoning`: the model calls at times without ending its reasoning first.
    `header`: where the prompt ends with it, it is the beginning of the reply's first marker.
    `unmarked_call`: the Lark of one call, where no marker needs to open it.
    `framed`: the Lark of choices (rules, one of them `answer`, whose text is the second argument)
    where the format lets nothing stand by itself.
    """

    name: str
    signs: tuple[str, ...]
    markers: tuple[str, ...]
    reader: Reader
    triggers: Callable[[str, NamedSchemas], Triggers]
    ambiguity: int = 0
    control: bool = False
    named_tokens: bool = False
    opening: str | None = None
    arguments_key: str = "arguments"
    drops: tuple[Drop, ...] = ()
    think: tuple[str, str] | None = None
    may_think: tuple[str, str] | None = None
    calls_in_reasoning: bool = False
    header: str = ""
    unmarked_call: Callable[[NamedSchemas], str] | None = None
    framed: Callable[[str, str], str] | None = None


def parameters_of(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return "", {}
    schema = tool.get("call_schema", function.get("parameters"))
    if not isinstance(schema, Mapping):
        schema = {}
    return str(function.get("name", "")), schema
