"""Tools in requests and prompts: validation of clients' tools, and the default format's
instruction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.conversation.tools.base import Tool, parameters_of
from localllm.errors import RequestError, UnsupportedError

# For models whose template has no tools: Hermes' instruction, which many small models know.
INSTRUCTION = """\
You may call functions to help with the user's request. The functions, as JSON schemas:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between tags, and nothing after them:
<tool_call>
{{"name": "function name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


_MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """A parsed `tool_choice`.

    `mode` is "auto", "none" or "required". `name` is set if one function is named.
    """

    mode: str
    name: str | None = None


def checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The function tools of a request, each completed with a description and parameters.

    Raises RequestError.
    """
    tools_by_name: dict[str, dict[str, Any]] = {}
    for i, sent_tool in enumerate(tools or ()):
        place = f"tools[{i}]"
        tool = _checked_tool(sent_tool, place)
        name = tool["function"]["name"]
        if name in tools_by_name:
            raise RequestError(f"{place}: two tools have the name {name[:60]!r}", param=place)
        tools_by_name[name] = tool
    return list(tools_by_name.values())


def _checked_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        raise UnsupportedError(
            f"{where}.type {str(kind)[:40]!r} is not supported; send functions", param=where
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        function = {}
    name = function.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
        raise RequestError(f"{where}.function needs a name", param=where)
    schema = function.get("parameters")
    if schema is not None and not isinstance(schema, Mapping):
        raise RequestError(f"{where}.function.parameters must be a JSON schema object", param=where)
    complete = {
        "name": name,
        "description": str(function.get("description") or ""),
        "parameters": dict(schema or {"type": "object", "properties": {}}),
    }
    checked_tool: dict[str, Any] = {"type": "function", "function": complete}
    if function.get("strict") is True or tool.get("strict") is True:
        checked_tool["strict"] = True
    return checked_tool


def apply_allowed_tools(tool_choice: Any, tools: Sequence[Tool]) -> tuple[list[Tool], Any]:
    """The selected subset of `tools` and a plain choice, from OpenAI's `allowed_tools`.

    Any other `tool_choice` is returned unchanged with all tools. Raises RequestError.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return list(tools), tool_choice
    fields = tool_choice
    if isinstance(tool_choice.get("allowed_tools"), Mapping):
        fields = tool_choice["allowed_tools"]
    listed_tools = fields.get("tools")
    mode = fields.get("mode", "auto")
    if not isinstance(listed_tools, list) or mode not in ("auto", "required"):
        raise RequestError(
            "allowed_tools needs an array of tools and a mode, auto or required",
            param="tool_choice",
        )
    allowed_names: list[Any] = []
    for tool in listed_tools:
        if isinstance(tool, Mapping) and tool.get("type", "function") == "function":
            function = tool.get("function")
            allowed_names.append((function if isinstance(function, Mapping) else tool).get("name"))
    allowed_tools = [tool for tool in tools if parameters_of(tool)[0] in allowed_names]
    if len(allowed_tools) < len(allowed_names):
        raise RequestError(
            "allowed_tools names a function that is not among the tools", param="tool_choice"
        )
    return allowed_tools, mode


def choice_of(tool_choice: Any, tools: Sequence[Tool]) -> Choice:
    """OpenAI's `tool_choice` for these tools. Raises RequestError."""
    if tool_choice is None:
        return Choice("auto" if tools else "none")
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") in (
        "auto",
        "none",
        "required",
        "any",
    ):
        tool_choice = tool_choice["type"]
    if isinstance(tool_choice, Mapping):
        return Choice("required", _chosen_name(tool_choice, tools))
    mode = {"any": "required"}.get(tool_choice, tool_choice)
    if mode not in ("auto", "none", "required"):
        raise RequestError(
            f"tool_choice {str(tool_choice)[:40]!r} is not auto, none, required or a function",
            param="tool_choice",
        )
    if mode == "required" and not tools:
        raise RequestError(
            "tool_choice requires a call, but the request has no tools", param="tools"
        )
    return Choice(mode if tools else "none")


def _chosen_name(tool_choice: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    function = tool_choice.get("function")
    name = (function if isinstance(function, Mapping) else tool_choice).get("name")
    if tool_choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            "tool_choice must be a string, or an object that names a function", param="tool_choice"
        )
    if name not in [parameters_of(tool)[0] for tool in tools]:
        raise RequestError(
            f"tool_choice names {name[:60]!r}, which is not among the tools", param="tool_choice"
        )
    return name


def with_instruction(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The conversation for a template without tools, with offers and earlier calls as text."""
    rewritten = [_as_text(message) for message in messages]
    if not tools:
        return rewritten
    tool_lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = INSTRUCTION.format(tools=tool_lines)
    if rewritten and rewritten[0]["role"] == "system":
        rewritten[0] = {
            **rewritten[0],
            "content": f"{rewritten[0]['content']}\n\n{instruction}".strip(),
        }
        return rewritten
    return [{"role": "system", "content": instruction}, *rewritten]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    copy = dict(message)
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = copy.pop("tool_calls", None)
    if calls:
        blocks = [_call_as_text(call["function"]) for call in calls]
        copy["content"] = "\n".join([copy["content"], *blocks]).strip()
    return copy


def _call_as_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
