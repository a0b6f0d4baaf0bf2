"""Qwen Code."""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.clients.agent import TASK, Agent, Place


def _mcp(place: Place, command: Sequence[str]) -> list[str]:
    first, *rest = command
    file = place.home / ".qwen/settings.json"
    settings = json.loads(file.read_text())
    settings["mcpServers"] = {"birds": {"command": first, "args": rest, "trust": True}}
    file.write_text(json.dumps(settings))
    return []


AGENT = Agent(
    "qwen-code",
    "npm",
    "@qwen-code/qwen-code",
    "0.24.4",
    lambda place: ("qwen", "-y", "-p", TASK),
    recipe="qwen",
    mcp=_mcp,
)
