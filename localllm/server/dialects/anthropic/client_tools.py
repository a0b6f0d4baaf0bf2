"""Anthropic-defined client tools (bash, text editor, memory, computer): clients send only their type, as Claude was
trained on them. Other models get a schema written from the documentation.

Sources: platform.claude.com/docs/en/agents-and-tools/tool-use, the types of the `anthropic` package, and for `insert_text`
github.com/anthropics/anthropic-sdk-python/issues/1155.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_TEXT, _WHOLE, _FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
_RANGE = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}


def client_tool(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """`tool` as a function with its documented parameters; None for one that only Anthropic's servers run."""
    kind, _, version = str(tool.get("type")).rpartition("_")
    make = _KINDS.get(kind)
    if make is None or not version.isdigit():
        return None
    description, parameters = make(tool, int(version))
    return {"name": tool.get("name"), "description": description, "parameters": parameters}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _said(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _bash(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    about = "Run a command in a bash shell that stays open between calls."
    parameters = _object(
        [],
        command=_said(_TEXT, "The command to run; needed unless the shell is restarted."),
        restart=_said(_FLAG, "True restarts the shell."),
    )
    return about, parameters


def _editing(*more: str) -> dict[str, Any]:
    return {"type": "string", "enum": ["view", "create", "str_replace", "insert", *more]}


def _inserted(name: str) -> dict[str, Any]:
    """The parameters by which a file's text is changed; the inserted text is called `name`."""
    changed = {
        "file_text": _said(_TEXT, "create: the file's whole text."),
        "old_str": _said(_TEXT, "str_replace: the text to replace, exactly as it stands in the file, once."),
        "new_str": _said(_TEXT, "str_replace: the text that takes its place."),
        "insert_line": _said(_WHOLE, "insert: the line to insert behind; 0 is the beginning of the file."),
        "view_range": _said(_RANGE, "view: the first and the last line to show, from 1; -1 is the end."),
    }
    if name == "new_str":
        changed["new_str"] = _said(_TEXT, "str_replace: the text that takes its place; insert: the text to insert.")
    else:
        changed[name] = _said(_TEXT, "insert: the text to insert.")
    return changed


def _text_editor(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    about = "View, create and edit text files. A folder is viewed as the list of what is in it."
    undoes = ["undo_edit"] if version <= 20250124 else []
    parameters = _object(
        ["command", "path"],
        command=_editing(*undoes),
        path=_said(_TEXT, "The file or folder."),
        **_inserted("insert_text" if version >= 20250728 else "new_str"),
    )
    most = tool.get("max_characters")
    if isinstance(most, int) and version >= 20250728:
        about += f" A view shows at most {most} characters."
    return about, parameters


def _memory(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    about = (
        "Read and write the files below /memories, which stay from one conversation to the next. View them before you "
        "begin a task."
    )
    parameters = _object(
        ["command"],
        command=_editing("delete", "rename"),
        path=_said(_TEXT, "The file or folder; needed by all but rename."),
        **_inserted("insert_text"),
        old_path=_said(_TEXT, "rename: the path as it is."),
        new_path=_said(_TEXT, "rename: the path as it will be."),
    )
    return about, parameters


_POINT = {"type": "array", "items": _WHOLE, "minItems": 2, "maxItems": 2}
_POINTER = ["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click", "double_click",
            "screenshot", "cursor_position"]  # fmt: skip
_SINCE_2025 = ["left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait"]


def _computer(tool: Mapping[str, Any], version: int) -> tuple[str, dict[str, Any]]:
    about = (
        f"Use the screen ({tool.get('display_width_px')} x {tool.get('display_height_px')} pixels), mouse and keyboard."
    )
    actions, more = list(_POINTER), {}
    if version >= 20250124:
        actions += _SINCE_2025
        more = {
            "start_coordinate": _said(_POINT, "left_click_drag: where it begins."),
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": _said(_WHOLE, "scroll: clicks of the wheel."),
            "duration": _said({"type": "number"}, "hold_key, wait: seconds."),
        }
    if version >= 20251124:
        actions.append("zoom")
        more["region"] = {"type": "array", "items": _WHOLE, "minItems": 4, "maxItems": 4}
    parameters = _object(
        ["action"],
        action={"type": "string", "enum": actions},
        coordinate=_said(_POINT, "x and y in pixels."),
        text=_said(_TEXT, "type: the text; key, hold_key: the keys."),
        **more,
    )
    return about, parameters


_KINDS: dict[str, Callable[[Mapping[str, Any], int], tuple[str, dict[str, Any]]]] = {
    "bash": _bash,
    "text_editor": _text_editor,
    "memory": _memory,
    "computer": _computer,
}
