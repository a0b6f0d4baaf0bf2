"""A service and its state; and what the managers share: running programs, writing and removing unit
files.

Each manager has a `name` (as `--manager` says it) and the same methods, which raise ServiceError:
`files` are those that `install` writes, with their texts; `install` starts the service, now and at
each login, and returns the files that changed; `restart` and `uninstall` wait for the server to
write what it knows; `state` is how it stands now; `log_command` shows its log's last lines and, to
`follow` it, what comes after them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from localllm.errors import LocalLLMError

NAME = "localllm"


class ServiceError(
    LocalLLMError,
    code="service_manager_failed",
    default_hint="`localllm serve` runs the same server in this terminal",
):
    """The system's service manager can't be asked, or refused what was asked of it."""


CommandResult: TypeAlias = subprocess.CompletedProcess[str]
# Runs a program and waits for it: the only way from here to the system. Tests hand in recorded
# answers.
Call = Callable[[Sequence[str]], CommandResult]


@dataclass(frozen=True, slots=True)
class Service:
    """`command` runs the server in the foreground;
    `settle` waits for the workers that a killed server left.
    `addresses`: what the manager may listen on in its place (`127.0.0.1:11535`, `[::1]:11535`, or a
    Unix socket's path).
    `memory_max_bytes` None = no limit of its own."""

    command: tuple[str, ...]
    settle: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """How the service stands. `since` is the manager's own words; `restarts` None where the manager
    does not count them; `last_exit` is 0 or None after a clean end. `memory_bytes`: of the server
    and its workers together."""

    installed: bool
    running: bool = False
    detail: str = ""
    pid: int | None = None
    since: str = ""
    restarts: int | None = None
    last_exit: int | None = None
    memory_bytes: int | None = None
    at_login: bool | None = None


# A restart waits for the server to write what it knows (systemd.py: TimeoutStopSec).
_LONGEST_S = 90


def call(command: Sequence[str]) -> CommandResult:
    """Run `command` and wait for it. Raises ServiceError if the program does not exist or hangs."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
        )
    except FileNotFoundError as e:
        raise ServiceError(f"{command[0]} is not installed") from e
    except subprocess.TimeoutExpired as e:
        raise ServiceError(f"`{' '.join(command)}` did not answer in {_LONGEST_S} s") from e


def output_of(answer: CommandResult) -> str:
    """The output of a program: its errors, or its standard output if there are none."""
    return (answer.stderr or answer.stdout).strip()


def checked(answer: CommandResult) -> CommandResult:
    """`answer`, unless it is a failure: then ServiceError."""
    if answer.returncode:
        shown = " ".join(answer.args[:4])  # PowerShell's script is long
        raise ServiceError(f"`{shown}` failed ({answer.returncode}): {output_of(answer)}")
    return answer


def write_all(files: Mapping[Path, str], encoding: str = "utf-8") -> list[Path]:
    """Write each text to its file, another text there moved to `.bak`; returns those that changed.
    Raises ServiceError."""
    changed = []
    for path, text in files.items():
        try:
            if path.exists():
                if path.read_bytes() == text.encode(encoding):
                    continue
                shutil.copy2(path, path.with_name(path.name + ".bak"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode(encoding))
        except OSError as e:
            raise ServiceError(f"{path} can't be written: {e.strerror}") from e
        changed.append(path)
    return changed


def remove_all(paths: Sequence[Path]) -> list[Path]:
    """Remove those of `paths` that are there; returns them. Raises ServiceError."""
    gone = []
    for path in paths:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as e:
            raise ServiceError(f"{path} can't be removed: {e.strerror}") from e
        gone.append(path)
    return gone
