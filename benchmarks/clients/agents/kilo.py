"""Kilo Code's CLI."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "kilo",
    "npm",
    "@kilocode/cli",
    "7.7.7",
    lambda place: ("kilo", "run", "--auto", "--model", f"localllm/{place.target.model}", TASK),
    recipe="kilo",
    limit_s=240.0,
    environment={"KILO_DISABLE_AUTOUPDATE": "1", "KILO_DISABLE_MODELS_FETCH": "1"},
)
