"""The tools of a Responses request: as functions for the model, and under the client's own names for its answer.

A namespace (Codex sends one per MCP server) becomes a prefix of its functions' names; a custom tool, which takes text
instead of arguments, becomes a function with one string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.conversation.tools.base import Tool
from localllm.conversation.tools.prompt import Choice, checked, choice_of, narrowed
from localllm.conversation.tools.regular import regular
from localllm.errors import RequestError

INPUT = "input"
"""The one argument of a custom tool."""
_BETWEEN = "__"
_PAIRS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


@dataclass(frozen=True, slots=True)
class ClientToolName:
    """A function under the client's name; `custom`: the client wants text, not arguments."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The functions for the model, and their names at the client. `skipped`: tools that only OpenAI's servers run."""

    functions: Sequence[Tool] = ()
    names: Mapping[str, ClientToolName] = field(default_factory=dict)
    skipped: Sequence[str] = ()

    @classmethod
    def of(cls, sent: Sequence[Any]) -> Toolbox:
        """The tools as a client sends them. Raises RequestError."""
        functions: list[dict[str, Any]] = []
        names: dict[str, ClientToolName] = {}
        skipped: list[str] = []
        for i, (tool, namespace) in enumerate(_each(sent, None)):
            kind, where = tool.get("type", "function"), f"tools[{i}]"
            if kind == "custom":
                function = _custom(tool, where, skipped)
            elif kind == "function":
                inner = tool.get("function")
                function = {"type": "function", "function": dict(inner if isinstance(inner, Mapping) else tool)}
            else:
                skipped.append(f"tools.{kind}")
                continue
            name = function["function"].get("name")
            if isinstance(name, str):
                flat = flat_name(name, namespace)
                function["function"]["name"] = flat
                names[flat] = ClientToolName(name, namespace, kind == "custom")
            functions.append(function)
        offered = checked(functions)
        for function, plain in zip(functions, offered, strict=True):
            plain.update({k: v for k, v in function.items() if k == "call_schema"})
        return cls(offered, names, skipped)

    def called(self, function: str) -> ClientToolName:
        """The client's name for a function."""
        return self.names.get(function) or ClientToolName(function)

    def chosen(self, sent: Any) -> tuple[Sequence[Tool], Choice]:
        """The functions and the choice that `tool_choice` leaves. Raises RequestError."""
        if isinstance(sent, Mapping):
            sent = {**sent, "tools": [_as_function(t) for t in sent["tools"]]} if _is_list(sent, "tools") else sent
            sent = _as_function(sent)
        functions, choice = narrowed(sent, self.functions)
        if not functions and choice in ("auto", "none"):
            choice = None
        return functions, choice_of(choice, functions)


def flat_name(name: str, namespace: str | None) -> str:
    """The model's name for the function `name` of `namespace`."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith(_BETWEEN) else namespace + _BETWEEN + name


def _each(sent: Sequence[Any], namespace: str | None) -> list[tuple[Mapping[str, Any], str | None]]:
    """Every tool with the namespace it stands in."""
    found: list[tuple[Mapping[str, Any], str | None]] = []
    for i, tool in enumerate(sent):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be an object", param="tools")
        if tool.get("type") == "namespace":
            name = tool.get("name")
            if namespace is not None or not isinstance(name, str) or not name or not _is_list(tool, "tools"):
                raise RequestError(f"tools[{i}]: a namespace needs a name and an array of tools", param="tools")
            found += _each(tool["tools"], name)
        else:
            found.append((tool, namespace))
    return found


def _is_list(of: Mapping[str, Any], key: str) -> bool:
    return isinstance(of.get(key), list)


def _as_function(choice: Any) -> Any:
    """`tool_choice` with the model's name for the function."""
    if isinstance(choice, Mapping) and choice.get("type") in ("custom", "function") and "name" in choice:
        return {"type": "function", "name": flat_name(str(choice["name"]), choice.get("namespace"))}
    return choice


def _custom(tool: Mapping[str, Any], where: str, skipped: list[str]) -> dict[str, Any]:
    """A custom tool as a function with one string, constrained by the tool's grammar if that is regular; if not, its name
    goes to `skipped`."""
    wanted = tool.get("format")
    shown: dict[str, Any] = {"type": "string", "description": "the whole text of the call"}
    held = dict(shown)
    if isinstance(wanted, Mapping) and wanted.get("type") == "grammar":
        syntax, definition = wanted.get("syntax"), wanted.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise RequestError(f"{where}.format needs a syntax (lark or regex) and a definition", param=where)
        shown["description"] += f", which matches this {syntax} grammar:\n{definition.strip()}"
        pattern = definition if syntax == "regex" else regular(definition)
        if pattern is None:
            skipped.append(f"tools.{tool.get('name')}.format")
        else:
            held["pattern"] = f"^(?:{pattern})$"
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": _of_one(shown)}
    return {"type": "function", "function": function, "call_schema": _of_one(held)}


def _of_one(described: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: described}, "required": [INPUT], "additionalProperties": False}


class CustomInputReader:
    """Extracts the text of a custom call from its streamed arguments `{"input": "…"}`."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = self._over = False

    def feed(self, arguments: str) -> str:
        """Feed more of the arguments; returns the text they add."""
        self._held += arguments
        if not self._inside:
            colon = self._held.find(":")
            opening = self._held.find('"', colon + 1) if colon >= 0 else -1
            if opening < 0:
                return ""
            self._inside, self._held = True, self._held[opening + 1 :]
        return "" if self._over else self._text()

    def _text(self) -> str:
        said: list[str] = []
        text, at = self._held, 0
        while at < len(text):
            char = text[at]
            if char == '"':
                self._over = True
                break
            if char != "\\":
                end = min((i for i in (text.find('"', at), text.find("\\", at)) if i >= 0), default=len(text))
                said.append(text[at:end])
                at = end
                continue
            read, length = self._escape(text, at)
            if not length:
                break
            said.append(read)
            at += length
        self._held = text[at:]
        return "".join(said)

    def _escape(self, text: str, at: int) -> tuple[str, int]:
        """An escape's character and length; 0 while it is incomplete."""
        if at + 1 >= len(text):
            return "", 0
        if text[at + 1] != "u":
            return _PAIRS.get(text[at + 1], text[at + 1]), 2
        # Half of a pair waits for the other half.
        length = 12 if text[at + 2 : at + 4].lower() in ("d8", "d9", "da", "db") else 6
        if len(text) < at + length:
            return "", 0
        try:
            return json.loads(f'"{text[at : at + length]}"'), length
        except ValueError:
            return text[at], 1
