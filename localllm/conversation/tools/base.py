"""What a tool-call format is. Everything about one way of writing calls stands in that format's own file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from localllm.conversation.reply import CallReader, Drop
from localllm.errors import UnsupportedError

Tool: TypeAlias = Mapping[str, Any]
"""A function as clients offer it: `{"type": "function", "function": {"name": …, "parameters": …}}`. A schema under
`held_to` is what its calls must match, where that is more than the model is shown."""
Named: TypeAlias = Sequence[tuple[str, Mapping[str, Any]]]
"""Functions: name and the JSON schema of the parameters."""
Grammar: TypeAlias = tuple[str, str]
"""A kind of grammar the engine knows and its source."""


class UnheldError(UnsupportedError):
    """A format's grammar has no way to write some name or value. Its calls are then read as the model writes them."""

    code = "unheld_call"

    def __init__(
        self,
        message: str = "this tool format has no way to write that",
        *,
        hint: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, param=param)


@dataclass(frozen=True, slots=True)
class Start:
    """What follows an opening: `lead` always, then what `grammar` allows, then `closing` always. `again`: another call
    may come behind it."""

    lead: str
    grammar: Grammar
    closing: str = ""
    again: bool = False


class ToolFormat(ABC):
    """One way models write calls: how it is told, how it is read, and the grammar that holds a call to its schema.

    `signs`: a template that contains one of them writes this format; the more `unsure` they are (other formats' templates
    have them too), the later it is asked. `markers` open a call. `control`: the markers are
    control tokens, which the engine must render. `named_tokens`: every marker, inner ones too, is a control token
    between < and >, which a grammar asks for by name. `drops`: structure that is neither answer nor call. `opening`
    wraps a forced call (JSON with `name` and `arguments_key`) up to its `{`; None means that forced calls use the
    default. `think`: the reasoning's markers, where the format itself has them. `in_thought`: the model calls at times without
    ending its reasoning first. `header`: where the prompt ends with it, it is the beginning of the reply's first marker.
    """

    name: ClassVar[str]
    signs: ClassVar[tuple[str, ...]]
    unsure: ClassVar[int] = 0
    markers: ClassVar[tuple[str, ...]]
    control: ClassVar[bool] = False
    named_tokens: ClassVar[bool] = False
    opening: ClassVar[str | None] = None
    arguments_key: ClassVar[str] = "arguments"
    drops: ClassVar[tuple[Drop, ...]] = ()
    think: ClassVar[tuple[str, str] | None] = None
    in_thought: ClassVar[bool] = False
    header: ClassVar[str] = ""

    @abstractmethod
    def reader(self, first: int, marker: str, tools: Sequence[Tool]) -> CallReader:
        """A reader of the calls behind `marker`, the first of which is the reply's call number `first`."""

    @abstractmethod
    def starts(self, template: str, tools: Named) -> dict[str, Start]:
        """Openings of calls and what may follow them, the first of a reply before those of further calls. Raises
        UnheldError where the grammar can't write what some tool asks for."""

    def unmarked_call(self, tools: Named) -> str | None:
        """The Lark of one call, where no marker needs to open it; None where one does."""
        return None

    def framed(self, choices: str, answer: str) -> str | None:
        """A Lark grammar of `choices` (rules, one of them `answer`, whose text is `answer`) where the format lets
        nothing stand by itself; None where it does."""
        return None


def parameters_of(tool: Tool) -> tuple[str, Mapping[str, Any]]:
    """A tool's function name and the JSON schema of its arguments."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return "", {}
    schema = tool.get("held_to", function.get("parameters"))
    return str(function.get("name", "")), schema if isinstance(schema, Mapping) else {}
