"""A system whose service manager answers from a table, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localllm.service.types import CommandResult


@dataclass
class Recorded:
    """`answers`: by the words that a command begins with; the longest that fits is taken, else
    success without words."""

    answers: Mapping[str, CommandResult]
    asked: list[str] = field(default_factory=list)

    def __call__(self, command: Sequence[str]) -> CommandResult:
        words = " ".join(command)
        self.asked.append(words)
        fitting = [key for key in self.answers if words.startswith(key)]
        return self.answers[max(fitting, key=len)] if fitting else CommandResult(0, "")
