"""A service and its state; and what the managers share: running programs, writing and removing unit
files."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from localllm.errors import LocalLLMError

NAME = "localllm"


class ServiceError(
    LocalLLMError,
    code="service_manager_failed",
    default_hint="`localllm serve` runs the same server in this terminal",
):
    """The system's service manager can't be asked, or refused what was asked of it."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program answered: its exit code (127: it is not installed) and what it wrote."""

    code: int
    out: str
    err: str = ""

    @property
    def text(self) -> str:
        """What it wrote, errors before anything else."""
        return (self.err or self.out).strip()


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
    log_file: Path | None = None
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


class Manager(Protocol):
    @property
    def name(self) -> str:
        """As `--manager` names it."""

    def files(self, service: Service) -> dict[Path, str]:
        """What `install` writes: each file and its text."""

    def install(self, service: Service) -> list[Path]:
        """Write the files, start the service now and at each login; returns the files that changed.
        Raises ServiceError."""

    def restart(self) -> None:
        """Stop it, waiting for it to write what it knows, and start it again. Raises
        ServiceError."""

    def uninstall(self) -> list[Path]:
        """Stop it and take its files away; returns them. Nothing else is removed. Raises
        ServiceError."""

    def state(self) -> State:
        """How it stands now. Raises ServiceError where the manager does not answer."""

    def log_command(self, lines: int, follow: bool) -> list[str]:
        """What shows the log's last `lines`, and with `follow` what comes after them."""


_NOT_INSTALLED = 127
# A restart waits for the server to write what it knows (systemd.py: TimeoutStopSec).
_LONGEST_S = 90


def call(command: Sequence[str]) -> CommandResult:
    """Run `command` and wait for it; code 127 where there is no such program. Raises ServiceError
    when it hangs."""
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
        )
    except FileNotFoundError:
        return CommandResult(_NOT_INSTALLED, "", f"{command[0]} is not installed")
    except subprocess.TimeoutExpired as e:
        raise ServiceError(f"`{' '.join(command)}` did not answer in {_LONGEST_S} s") from e
    return CommandResult(done.returncode, done.stdout, done.stderr)


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
