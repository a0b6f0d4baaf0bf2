"""pi."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "pi",
    "npm",
    "@earendil-works/pi-coding-agent",
    "1.6.0",
    lambda place: (
        "pi",
        "--offline",
        "--provider",
        "localllm",
        "--model",
        place.target.model,
        "-p",
        TASK,
    ),
    recipe="pi",
)
