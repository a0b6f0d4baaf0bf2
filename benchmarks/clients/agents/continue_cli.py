"""Continue's CLI."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "continue-cli",
    "npm",
    "@continuedev/cli",
    "1.5.47",
    lambda place: (
        "cn",
        "--config",
        str(place.home / ".continue/config.yaml"),
        "--auto",
        "-p",
        TASK,
    ),
    recipe="continue",
)
