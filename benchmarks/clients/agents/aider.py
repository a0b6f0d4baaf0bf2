"""aider: it offers no tools. The file is in its prompt, the answer contains the whole new file, and
a test runs afterwards."""

from __future__ import annotations

from benchmarks.clients.agent import TASK, Agent
from benchmarks.clients.brain import NEW, OLD, TEXT, THOUGHT, Worker


class Editing(Worker):
    """Writes the whole new file if the prompt shows the file."""

    def __call__(self, prompt: str) -> list[str]:
        """Return the answer with the new file, or a commit message."""
        if OLD in prompt and "```" in prompt:
            self.steps.append("answer")
            self.first_prompt = self.first_prompt or prompt
            said = f"notes.txt\n```\n{TEXT.replace(OLD, NEW)}```\n"
        else:
            self.steps.append("side")
            said = "docs: another bird"
        return [self.notation.write(THOUGHT, said, ())]


AGENT = Agent(
    "aider",
    "pip",
    "aider-chat",
    "0.86.2",
    lambda place: (
        "aider", "--model", f"openai/{place.target.model}", "--yes-always", "--no-check-update",
        "--analytics-disable",
        "--no-show-release-notes", "--no-gitignore", "--edit-format", "whole", "--no-auto-commits",
        "--test-cmd", f"grep '{NEW}' notes.txt", "--auto-test", "--message", TASK, "notes.txt",
    ),
    recipe="aider",
    worker=Editing,
    offers_tools=False,
    says=f"The bird is a {NEW}",
)  # fmt: skip
