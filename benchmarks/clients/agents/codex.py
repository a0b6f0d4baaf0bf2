"""Codex CLI."""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.clients.agent import TASK, Agent, Place


def _mcp(place: Place, command: Sequence[str]) -> list[str]:
    first, *rest = command
    return [
        "-c",
        f"mcp_servers.birds.command={json.dumps(first)}",
        "-c",
        f"mcp_servers.birds.args={json.dumps(rest)}",
    ]


AGENT = Agent(
    "codex",
    "npm",
    "@openai/codex",
    "0.171.0",
    lambda place: (
        "codex", "exec", "--profile", "localllm", "--skip-git-repo-check",
        "--dangerously-bypass-approvals-and-sandbox", TASK,
    ),
    recipe="codex",
    mcp=_mcp,
)  # fmt: skip
