"""Claude Code."""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.clients.agent import TASK, Agent, Place


def _mcp(place: Place, command: Sequence[str]) -> list[str]:
    first, *rest = command
    file = place.home / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"birds": {"command": first, "args": rest}}}))
    return ["--mcp-config", str(file), "--allowedTools", "mcp__birds__count_birds"]


AGENT = Agent(
    "claude",
    "npm",
    "@anthropic-ai/claude-code",
    "2.1.332",
    lambda place: (
        "claude",
        "-p",
        TASK,
        "--permission-mode",
        "acceptEdits",
        "--allowedTools",
        "Bash Edit Read Write",
    ),
    recipe="claude",
    mcp=_mcp,
)
