"""The `llm` command, with the functions of a file as its tools."""

from __future__ import annotations

from pathlib import Path

from benchmarks.clients.agent import TASK, Agent

_TOOLS = Path(__file__).parents[1] / "sdk/llm_tools.py"

AGENT = Agent(
    "llm",
    "pip",
    "llm",
    "0.36",
    lambda place: (
        "llm",
        "-m",
        f"local/{place.target.model}",
        "--functions",
        str(_TOOLS),
        "--chain-limit",
        "8",
        TASK,
    ),
    recipe="llm",
    limit_s=60.0,
)
