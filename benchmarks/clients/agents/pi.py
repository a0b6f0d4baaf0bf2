"""pi."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "pi",
    "npm",
    "@mariozechner/pi-coding-agent",
    "0.73.1",
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
