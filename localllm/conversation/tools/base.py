"""The definition of a tool-call format. Each format is described completely in its own file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localllm.conversation.reply import CallReader, Drop
from localllm.errors import UnsupportedError
from localllm.grammars.trigger import GrammarTrigger as GrammarTrigger

Tool: TypeAlias = Mapping[str, Any]
"""A function as clients offer it: `{"type": "function", "function": {"name": …, "parameters": …}}`.
If `call_schema` is set, calls must match that schema instead of the one that the model sees."""
NamedSchemas: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Functions: name and the JSON schema of the parameters."""
Grammar: TypeAlias = tuple[str, str]
"""The kind of a grammar (json_schema, lark, …) and its source text."""


class NotConstrainableError(UnsupportedError, code="not_constrainable"):
    """A format's grammar can't spell some name or value.

    Calls are then read as the model writes them.
    """


Reader: TypeAlias = Callable[[int, str, Sequence[Tool]], CallReader]
"""Makes the reader for calls of the tools after an opening marker. Arguments: the index of the next
call within the reply, the marker, and the tools."""
Triggers: TypeAlias = dict[str, GrammarTrigger]
"""By opening marker: the grammar of the text after it. The markers of a reply's first call come
before those of further calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A tool-call format: how it is detected and read, and the grammar that constrains its calls.

    - `signs`: a template that contains one of them writes this format.
    - `ambiguity`: above 0 if the signs also occur in other formats' templates. Formats with a
      higher value are tested later.
    - `markers`: texts that open a call.
    - `reader`: reads the text after a marker.
    - `triggers`: returns the triggers for a template and the functions that may be called. Raises
      NotConstrainableError if the grammar can't write some tool's arguments.
    - `control`: the markers are control tokens, which the engine must render.
    - `named_tokens`: every marker, inner ones too, is a control token between < and >. A grammar
      refers to it by name.
    - `drops`: structure that is neither answer nor call.
    - `opening`: the text before a forced call (JSON with `name` and `arguments_key`) up to its `{`.
      None means that forced calls use the default format.
    - `think`: the reasoning's markers, if the format itself defines them.
    - `may_think`: the markers of reasoning models with this format. Their templates mention them.
    - `calls_in_reasoning`: the model sometimes calls without ending its reasoning first.
    - `header`: if the prompt ends with it, it is the beginning of the reply's first marker.
    - `unmarked_call`: the Lark of one call, if calls need no marker.
    - `framed`: adds the frame that the format requires around everything. Takes the Lark of the
      choices (rules, one of them `answer`) and the Lark of the answer.
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
