"""A service and its state, and functions that the managers share: run programs, write and remove
unit files.

Each manager has a `name` (the value of `--manager`) and the same methods, which raise ServiceError:
* `files` returns the files that `install` writes, with their texts.
* `install` starts the service now and at each login, and returns the changed files.
* `restart` and `uninstall` wait for the server to save its data.
* `state` returns the current state.
* `log_command` returns the command that shows the log's last lines. With `follow`, it continues
  with new lines.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from localllm import paths
from localllm.errors import LocalLLMError

NAME = "localllm"


class ServiceError(
    LocalLLMError,
    code="service_manager_failed",
    default_hint="`localllm serve` runs the same server in this terminal",
):
    """The system's service manager can't be reached or refused the request."""


CommandResult: TypeAlias = subprocess.CompletedProcess[str]
# Runs a program and waits for it. All access to the system goes through it. Tests pass recorded
# answers instead.
Call = Callable[[Sequence[str]], CommandResult]


@dataclass(frozen=True, slots=True)
class Service:
    """The server as a service.

    `command`: runs the server in the foreground.
    `settle`: waits for the workers that a killed server left.
    `addresses`: addresses on which the manager may listen instead (`127.0.0.1:11535`,
    `[::1]:11535`, or a Unix socket's path).
    `memory_max_bytes`: memory limit (None: no limit).
    """

    command: tuple[str, ...]
    settle: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    memory_max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """The state of the service.

    `since`: the start time in the manager's format.
    `restarts`: None if the manager does not count them.
    `last_exit`: 0 or None after a clean end.
    `memory_bytes`: memory of the server and its workers together.
    """

    installed: bool
    running: bool = False
    detail: str = ""
    pid: int | None = None
    since: str = ""
    restarts: int | None = None
    last_exit: int | None = None
    memory_bytes: int | None = None
    at_login: bool | None = None


# Seconds. A restart waits for the server to save its data (systemd.py: TimeoutStopSec).
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
    """Return a program's error output, or its standard output if the error output is empty."""
    return (answer.stderr or answer.stdout).strip()


def checked(answer: CommandResult) -> CommandResult:
    """Return `answer`. Raises ServiceError if the program failed."""
    if answer.returncode:
        shown = " ".join(answer.args[:4])  # PowerShell's script is long
        raise ServiceError(f"`{shown}` failed ({answer.returncode}): {output_of(answer)}")
    return answer


def write_all(files: Mapping[Path, str], encoding: str = "utf-8") -> list[Path]:
    """Write each text to its file, and return the changed files. Raises ServiceError.

    An existing file with another text is copied to `.bak` first.
    """
    changed = []
    for path, text in files.items():
        try:
            if path.exists():
                if paths.file_bytes(path) == text.encode(encoding):
                    continue
                shutil.copy2(path, path.with_name(path.name + ".bak"))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode(encoding))
        except OSError as e:
            raise ServiceError(f"{path} can't be written: {e.strerror}") from e
        changed.append(path)
    return changed


def remove_all(paths: Sequence[Path]) -> list[Path]:
    """Delete the existing files among `paths`, and return them. Raises ServiceError."""
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
