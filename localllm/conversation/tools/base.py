"""What a tool-call format is. Everything about one way of writing calls stands in that notation's
own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from localllm.conversation.reply import CallReader, Drop
from localllm.errors import UnsupportedError

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


@dataclass(frozen=True, slots=True)
class GrammarTrigger:
    """What follows the marker that turns a grammar on: `lead` always, then what `grammar` allows,
    then `closing` always. `again`: another call may follow."""

    lead: str
    grammar: Grammar
    closing: str = ""
    again: bool = False


class ToolFormat(ABC):
    """One way models write calls: how it is detected, how it is read, and the grammar that
    constrains a call to its schema.

    `signs`: a template that contains one of them writes this format; formats whose signs stand in
    other formats' templates too have an `ambiguity`, and those with a higher one are tested later.
    `markers` open a call.
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
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]]
    ambiguity: ClassVar[int] = 0
    markers: ClassVar[tuple[str, ...]]
    control: ClassVar[bool] = False
    named_tokens: ClassVar[bool] = False
    opening: ClassVar[str | None] = None
    arguments_key: ClassVar[str] = "arguments"
    drops: ClassVar[tuple[Drop, ...]] = ()
    think: ClassVar[tuple[str, str] | None] = None
    may_think: ClassVar[tuple[str, str] | None] = None
    calls_in_reasoning: ClassVar[bool] = False
    header: ClassVar[str] = ""

    @abstractmethod
    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> CallReader:
        """A reader of the calls behind `marker`, the first of which is the reply's call number
        `first`."""

    @abstractmethod
    def triggers(self, template: str, tools: NamedSchemas) -> dict[str, GrammarTrigger]:
        """Openings of calls and what may follow them, the first of a reply before those of further
        calls. Raises NotConstrainableError where the grammar can't write what some tool asks
        for."""

    def unmarked_call(self, tools: NamedSchemas) -> str | None:
        """The Lark of one call, where no marker needs to open it; None where one does."""
        return None

    def framed(self, choices: str, answer: str) -> str | None:
        """A Lark grammar of `choices` (rules, one of them `answer`, whose text is `answer`) where
        the format lets nothing stand by itself; None where it does."""
        return None


def parameters_of(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return "", {}
    schema = tool.get("call_schema", function.get("parameters"))
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}
