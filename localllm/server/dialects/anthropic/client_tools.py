"""Anthropic-defined client tools (bash, text editor, memory, computer): clients send only their
type, as Claude was trained on them. Other models get a schema written from the documentation.

Sources: platform.claude.com/docs/en/agents-and-tools/tool-use, the types of the `anthropic`
package, and for `insert_text` github.com/anthropics/anthropic-sdk-python/issues/1155.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {"type": "string"}
_WHOLE = {"type": "integer"}
_FLAG = {"type": "boolean"}
_RANGE = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}


def is_client_tool(kind: Any) -> bool:
    """Whether the client runs the tools of that type."""
    name, _, version = str(kind).rpartition("_")
    return name in ("bash", "text_editor", "memory", "computer") and version.isdigit()


def function_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """`tool` as a function, one of the client's with its documented parameters; None for one that
    only Anthropic's servers run."""
    if tool.get("type") in (None, "custom"):
        return {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "strict": tool.get("strict"),
            "parameters": tool.get("input_schema"),
        }
    if not is_client_tool(tool.get("type")):
        return None
    kind, _, version = str(tool["type"]).rpartition("_")
    description, parameters = _described(tool, kind, int(version))
    return {"name": tool.get("name"), "description": description, "parameters": parameters}


def _object(required: list[str], properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _of(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _one_of(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": [*values]}


_BASH = _object(
    [],
    {
        "command": _of(_TEXT, "The command to run; needed unless the shell is restarted."),
        "restart": _of(_FLAG, "True restarts the shell."),
    },
)
_EDITS = ("view", "create", "str_replace", "insert")
_FILE = {
    "file_text": _of(_TEXT, "create: the file's whole text."),
    "old_str": _of(
        _TEXT, "str_replace: the text to replace, exactly as it stands in the file, once."
    ),
    "new_str": _of(_TEXT, "str_replace: the text that takes its place."),
    "insert_line": _of(
        _WHOLE, "insert: the line to insert behind; 0 is the beginning of the file."
    ),
    "view_range": _of(_RANGE, "view: the first and the last line to show, from 1; -1 is the end."),
}
# The inserted text has a name of its own since 2025-07-28.
_INSERTED = {**_FILE, "insert_text": _of(_TEXT, "insert: the text to insert.")}
_INSERTED_AS_NEW = {
    **_FILE,
    "new_str": _of(
        _TEXT, "str_replace: the text that takes its place; insert: the text to insert."
    ),
}
_MEMORY = _object(
    ["command"],
    {
        "command": _one_of(*_EDITS, "delete", "rename"),
        "path": _of(_TEXT, "The file or folder; needed by all but rename."),
        **_INSERTED,
        "old_path": _of(_TEXT, "rename: the path as it is."),
        "new_path": _of(_TEXT, "rename: the path as it will be."),
    },
)
_POINTER = (
    "key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click",
    "double_click", "screenshot", "cursor_position",
)  # fmt: skip
_SINCE_2025 = ("left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait")
_PARAMETERS_SINCE_2025 = {
    "start_coordinate": _of(_RANGE, "left_click_drag: where it begins."),
    "scroll_direction": _one_of("up", "down", "left", "right"),
    "scroll_amount": _of(_WHOLE, "scroll: clicks of the wheel."),
    "duration": _of({"type": "number"}, "hold_key, wait: seconds."),
}
_REGION = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}


def _text_editor(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    about = "View, create and edit text files. A folder is viewed as the list of what is in it."
    commands = list(_EDITS)
    changes = _INSERTED_AS_NEW
    if version <= 20250124:
        commands.append("undo_edit")
    if version >= 20250728:
        changes = _INSERTED
        most = tool.get("max_characters")
        if isinstance(most, int):
            about += f" A view shows at most {most} characters."
    path = _of(_TEXT, "The file or folder.")
    properties = {"command": _one_of(*commands), "path": path, **changes}
    return about, _object(["command", "path"], properties)


def _computer(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    width = tool.get("display_width_px")
    height = tool.get("display_height_px")
    actions = [*_POINTER]
    more: dict[str, Any] = {}
    if version >= 20250124:
        actions += _SINCE_2025
        more |= _PARAMETERS_SINCE_2025
    if version >= 20251124:
        actions.append("zoom")
        more["region"] = _REGION
    properties = {
        "action": _one_of(*actions),
        "coordinate": _of(_RANGE, "x and y in pixels."),
        "text": _of(_TEXT, "type: the text; key, hold_key: the keys."),
        **more,
    }
    about = f"Use the screen ({width} x {height} pixels), mouse and keyboard."
    return about, _object(["action"], properties)


def _described(tool: Mapping[str, Any], kind: str, version: int) -> tuple[str, dict[str, Any]]:
    """The description and the parameters of a tool of that kind."""
    match kind:
        case "bash":
            return "Run a command in a bash shell that stays open between calls.", _BASH
        case "text_editor":
            return _text_editor(tool, version)
        case "memory":
            about = (
                "Read and write the files below /memories, which stay from one conversation to the "
                "next. View them before you begin a task."
            )
            return about, _MEMORY
        case _:
            return _computer(tool, version)
