"""GitHub's Copilot CLI, without an account."""

from benchmarks.clients.agent import TASK, Agent

AGENT = Agent(
    "copilot-cli",
    "npm",
    "@github/copilot",
    "1.0.102",
    lambda place: ("copilot", "--allow-all-tools", "-p", TASK),
    recipe="copilot",
    environment={"COPILOT_AUTO_UPDATE": "false"},
)
