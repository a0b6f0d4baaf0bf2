"""The tools in OpenAI's requests. The model sees them as functions; the answer uses the client's
own names.

A namespace (Codex sends one per MCP server) becomes a prefix of its functions' names. A custom tool
takes text instead of arguments; it becomes a function with one string."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from localllm.conversation.tools.base import Tool
from localllm.conversation.tools.prompt import Choice, apply_allowed_tools, checked_tools, choice_of
from localllm.conversation.tools.regular import regular
from localllm.errors import RequestError

INPUT = "input"
"""The name of a custom tool's only argument."""
_BETWEEN = "__"


@dataclass(frozen=True, slots=True)
class ClientToolName:
    """A function's name as the client sent it. `custom`: the client expects text instead of
    arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions for the model, and the client's names for them. `skipped`: tools that only
    OpenAI's servers can run."""

    functions: Sequence[Tool] = ()
    names: Mapping[str, ClientToolName] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    @classmethod
    def of(cls, sent: Sequence[Any] | None) -> Toolbox:
        """Return the toolbox for the tools that a client sent. Raises RequestError."""
        functions: list[dict[str, Any]] = []
        names: dict[str, ClientToolName] = {}
        skipped: list[str] = []
        for i, (tool, namespace) in enumerate(_each(sent or ())):
            kind = tool.get("type", "function")
            if kind == "custom":
                function = _custom(tool, f"tools[{i}]", skipped)
            elif kind == "function":
                function = {
                    "type": "function",
                    "strict": tool.get("strict"),
                    "function": dict(_inner(tool, "function")),
                }
            else:
                skipped.append(f"tools.{kind}")
                continue
            name = function["function"].get("name")
            flat = flat_name(name, namespace)
            function["function"]["name"] = flat
            names[str(flat)] = ClientToolName(name, namespace, kind == "custom")
            functions.append(function)
        offered = checked_tools(functions)
        for function, plain in zip(functions, offered, strict=True):
            if "call_schema" in function:
                plain["call_schema"] = function["call_schema"]
        return cls(offered, names, skipped)

    def called(self, function: str) -> ClientToolName:
        """Return the client's name for a function."""
        return self.names.get(function) or ClientToolName(function)

    def chosen(self, sent: Any) -> tuple[Sequence[Tool], Choice]:
        """Return the functions that `tool_choice` allows, and the choice among them. Raises
        RequestError."""
        if isinstance(sent, Mapping):
            sent = {**sent, **_inner(sent, "allowed_tools")}
            if isinstance(sent.get("tools"), list):
                sent["tools"] = [_as_function(tool) for tool in sent["tools"]]
                sent["allowed_tools"] = None
            sent = _as_function(sent)
        functions, choice = apply_allowed_tools(sent, self.functions)
        return functions, choice_of(choice, functions)


NO_TOOLS = Toolbox()


def flat_name(name: Any, namespace: Any) -> Any:
    """Return the model's name for the function `name` of `namespace`."""
    if not namespace or not isinstance(name, str) or not isinstance(namespace, str):
        return name
    return namespace.removesuffix(_BETWEEN) + _BETWEEN + name


def _inner(sent: Mapping[str, Any], field_name: str) -> Mapping[str, Any]:
    """Return the object in that field, or `sent` itself if the field holds no object."""
    inner = sent.get(field_name)
    return inner if isinstance(inner, Mapping) else sent


def _each(
    sent: Sequence[Any], namespace: str | None = None
) -> Iterator[tuple[Mapping[str, Any], str | None]]:
    """Yield every tool with the namespace that contains it, or None. Raises RequestError."""
    for i, tool in enumerate(sent):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be an object", param="tools")
        name = tool.get("name")
        inner = tool.get("tools")
        if tool.get("type") != "namespace":
            yield tool, namespace
        elif namespace is None and isinstance(name, str) and name and isinstance(inner, list):
            yield from _each(inner, name)
        else:
            raise RequestError(
                f"tools[{i}]: a namespace needs a name and an array of tools", param="tools"
            )


def _as_function(choice: Any) -> Any:
    """Return `tool_choice` with the model's name for the function."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind not in ("custom", "function"):
        return choice
    name = _inner(choice, kind).get("name")
    return {"type": "function", "name": flat_name(name, choice.get("namespace"))}


def _custom(tool: Mapping[str, Any], where: str, skipped: list[str]) -> dict[str, Any]:
    """Return a custom tool as a function with one string. If the tool's grammar is regular, it
    constrains the string. Otherwise the path of `format` is added to `skipped`."""
    tool = _inner(tool, "custom")
    wanted = tool.get("format")
    shown: dict[str, Any] = {
        "type": "string",
        "description": "the complete input of the tool as text",
    }
    described = dict(shown)
    if isinstance(wanted, Mapping) and wanted.get("type") == "grammar":
        grammar = _inner(wanted, "grammar")
        syntax = grammar.get("syntax")
        definition = grammar.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise RequestError(
                f"{where}.format needs a syntax (lark or regex) and a definition", param=where
            )
        shown["description"] += f", which matches this {syntax} grammar:\n{definition.strip()}"
        pattern = definition if syntax == "regex" else regular(definition)
        if pattern is None:
            skipped.append(f"tools.{tool.get('name')}.format")
        else:
            described["pattern"] = f"^(?:{pattern})$"
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": _of_one(shown),
    }
    return {"type": "function", "function": function, "call_schema": _of_one(described)}


def _of_one(described: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {INPUT: described},
        "required": [INPUT],
        "additionalProperties": False,
    }


class CustomInputReader:
    """Extracts the text of a custom call from its streamed arguments `{"input": "…"}`."""

    def __init__(self) -> None:
        self._arguments = self._text = ""

    def feed(self, arguments: str) -> str:
        """Add more of the arguments and return the additional text."""
        self._arguments += arguments
        before = self._text
        try:
            read = from_json(self._arguments or "{}", allow_partial="trailing-strings")
            self._text = _first_text(read)
        except ValueError:  # not constrained by a grammar, and not JSON
            self._text += arguments
        return self._text[len(before) :]


def _first_text(read: Any) -> str:
    if isinstance(read, dict):
        for value in read.values():
            if isinstance(value, str):
                return value
    return ""
