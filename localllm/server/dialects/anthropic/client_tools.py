"""Anthropic-defined client tools: bash, text editor, memory, computer. Clients send only their
type, because Claude was trained on them. Other models get a schema written from the documentation
(`client_tools.toml`).

Sources: platform.claude.com/docs/en/agents-and-tools/tool-use, the types of the `anthropic`
package, and for `insert_text` github.com/anthropics/anthropic-sdk-python/issues/1155."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KINDS: Mapping[str, Any] = tomllib.loads(
    Path(__file__).with_name("client_tools.toml").read_text(encoding="utf-8")
)
# Since this version, clients send the maximum number of characters that a view shows.
_MAX_CHARACTERS_SINCE = 20250728


def is_client_tool(kind: Any) -> bool:
    """Return whether the client runs tools of that type."""
    name, _, version = str(kind).rpartition("_")
    return name in _KINDS and version.isdigit()


def function_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `tool` as a function. A client tool gets its documented parameters. Return None for a
    tool that only Anthropic's servers run."""
    sent_type = tool.get("type")
    if sent_type in (None, "custom"):
        return {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "strict": tool.get("strict"),
            "parameters": tool.get("input_schema"),
        }
    if not is_client_tool(sent_type):
        return None
    kind, _, date = str(sent_type).rpartition("_")
    version = int(date)
    return {
        "name": tool.get("name"),
        "description": _description(tool, kind, version),
        "parameters": _parameters(kind, version),
    }


def _description(tool: Mapping[str, Any], kind: str, version: int) -> str:
    about: str = _KINDS[kind]["description"]
    if kind == "computer":
        width = tool.get("display_width_px")
        return about.format(width=width, height=tool.get("display_height_px"))
    if kind == "text_editor" and version >= _MAX_CHARACTERS_SINCE:
        max_characters = tool.get("max_characters")
        if isinstance(max_characters, int):
            return f"{about} A view shows at most {max_characters} characters."
    return about


def _parameters(kind: str, version: int) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments."""
    documented = _KINDS[kind]
    properties = dict(documented["parameters"])
    for first, changed in documented.get("since", {}).items():
        if version >= int(first):
            properties |= changed
    for last, changed in documented.get("until", {}).items():
        if version <= int(last):
            properties |= changed
    return {
        "type": "object",
        "properties": properties,
        "required": documented["required"],
        "additionalProperties": False,
    }
