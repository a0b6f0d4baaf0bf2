"""A simulated service manager that answers from a table and records the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import CompletedProcess


def answered(code: int, out: str, err: str = "") -> CompletedProcess[str]:
    """Return a program's result: its exit code and its output."""
    return CompletedProcess((), code, out, err)


@dataclass
class Recorded:
    """A runner of commands that answers from `answers`.

    Its keys are beginnings of commands. The longest matching key is used. Without a match, the
    command succeeds without output.
    """

    answers: Mapping[str, CompletedProcess[str]]
    asked: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CompletedProcess[str]:
        words = " ".join(command)
        self.asked.append(words)
        fitting = [key for key in self.answers if words.startswith(key)]
        found = self.answers[max(fitting, key=len)] if fitting else answered(0, "")
        return CompletedProcess(command, found.returncode, found.stdout, found.stderr)
