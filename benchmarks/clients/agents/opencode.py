"""opencode."""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.clients.agent import TASK, Agent, Place


def _mcp(place: Place, command: Sequence[str]) -> list[str]:
    file = place.home / ".config/opencode/opencode.json"
    settings = json.loads(file.read_text())
    settings["mcp"] = {"birds": {"type": "local", "command": list(command), "enabled": True}}
    file.write_text(json.dumps(settings))
    return []


AGENT = Agent(
    "opencode",
    "npm",
    "opencode-ai",
    "1.18.33",
    lambda place: ("opencode", "run", "--auto", "--model", f"localllm/{place.target.model}", TASK),
    recipe="opencode",
    mcp=_mcp,
    environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
)
