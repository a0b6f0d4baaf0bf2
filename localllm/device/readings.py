"""Readings: everything the probes read from one machine, as text, so that a recorded machine can be read again."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

System = Literal["linux", "macos", "windows"]


@dataclass(frozen=True, slots=True)
class Readings:
    """What one machine said. `files` maps a path to its text, `outputs` a probe or command to what it printed.

    Anything that could not be read is simply absent: no reading is ever invented.
    """

    system: System
    architecture: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    def file(self, path: str) -> str:
        """The file's text without surrounding blanks and NULs, "" if it was not there."""
        return self.files.get(path, "").strip("\x00 \t\r\n")

    def output(self, name: str) -> str:
        """What the command printed, "" if it was not there."""
        return self.outputs.get(name, "")

    def matching(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted."""
        return sorted(fnmatch.filter(self.files, pattern))
