"""mini-swe-agent: its only tool is a shell, and a special command ends the work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.clients.agent import TASK, Agent
from benchmarks.clients.brain import Offered, Worker


class Submitting(Worker):
    """Ends with the command that its prompt names."""

    def calls(self, prompt: str, tools: Sequence[Offered]) -> list[tuple[str, dict[str, Any]]]:
        """Return the usual calls, then the final command."""
        usual = super().calls(prompt, tools)
        if usual:
            return usual
        self.steps.append("answer")
        return [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]


AGENT = Agent(
    "mini-swe",
    "pip",
    "mini-swe-agent",
    "2.4.6",
    lambda place: (
        "mini",
        "-y",
        "--exit-immediately",
        "-m",
        f"openai/{place.target.model}",
        "-t",
        TASK,
    ),
    recipe="mini-swe",
    also=("mcp",),  # LiteLLM requires it
    worker=Submitting,
    says="",
)
