"""Mistral Vibe."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "mistral-vibe",
    "pip",
    "mistral-vibe",
    "3.0.3",
    lambda place: ("vibe", "--auto-approve", "-p", TASK),
    recipe="mistral-vibe",
    limit_s=240.0,
    python="python3.12",
)
