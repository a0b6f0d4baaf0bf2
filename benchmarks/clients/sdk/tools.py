"""The three tools for every library here, and the server's address."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

URL = os.environ["LOCALLLM_URL"]
MODEL = os.environ["LOCALLLM_MODEL"]
TASK = os.environ["LOCALLLM_TASK"]
KEY = os.environ.get("LOCALLLM_KEY", "local")
MOST_TURNS = 8


def read_file(path: str, limit: int = 200_000) -> str:
    """Read a file.

    Args:
        path: The file.
        limit: The most characters to return.
    """
    return Path(path).read_text()[:limit]


def edit_file(path: str, old_string: str, new_string: str) -> str:
    """Replace a text in a file.

    Args:
        path: The file.
        old_string: What is there.
        new_string: What is to be there.
    """
    file = Path(path)
    file.write_text(file.read_text().replace(old_string, new_string))
    return "Edited."


def run_command(command: str, timeout_ms: int) -> str:
    """Run a command.

    Args:
        command: For a shell.
        timeout_ms: How long it may take.
    """
    assert timeout_ms == 120_000, f"the number came as {timeout_ms!r}"
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=timeout_ms / 1000
    ).stdout


FUNCTIONS = {f.__name__: f for f in (read_file, edit_file, run_command)}
_TEXT = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "read_file": {
        "type": "object",
        "properties": {
            "path": _TEXT,
            "limit": {"type": "integer", "minimum": 1, "maximum": 9_007_199_254_740_991},
        },
        "required": ["path"],
    },
    "edit_file": {
        "type": "object",
        "properties": {"path": _TEXT, "old_string": _TEXT, "new_string": _TEXT},
        "required": ["path", "old_string", "new_string"],
    },
    "run_command": {
        "type": "object",
        "properties": {
            "command": _TEXT,
            "timeout_ms": {"type": "integer", "minimum": 1, "maximum": 600_000},
        },
        "required": ["command", "timeout_ms"],
    },
}


def chat_tools() -> list[dict[str, Any]]:
    """Return the tools in the format of OpenAI's chat API."""
    return [
        {
            "type": "function",
            "function": {"name": n, "description": FUNCTIONS[n].__doc__, "parameters": s},
        }
        for n, s in SCHEMAS.items()
    ]


def call(name: str, arguments: dict[str, Any]) -> str:
    """Run a tool."""
    return FUNCTIONS[name](**arguments)
