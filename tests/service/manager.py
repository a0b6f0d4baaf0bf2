"""A system whose service manager answers from a table, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from subprocess import CompletedProcess


def answered(code: int, out: str, err: str = "") -> CompletedProcess[str]:
    """What a program answers: its exit code and what it wrote."""
    return CompletedProcess((), code, out, err)


@dataclass
class Recorded:
    """`answers`: by the words that a command begins with; the longest that fits is taken, else
    success without words."""

    answers: Mapping[str, CompletedProcess[str]]
    asked: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CompletedProcess[str]:
        words = " ".join(command)
        self.asked.append(words)
        fitting = [key for key in self.answers if words.startswith(key)]
        found = self.answers[max(fitting, key=len)] if fitting else answered(0, "")
        return CompletedProcess(command, found.returncode, found.stdout, found.stderr)
