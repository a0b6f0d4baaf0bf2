"""What a service is, and how it stands: the values between the command line and the managers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from localllm.errors import LocalLLMError

NAME = "localllm"


class ServiceError(LocalLLMError):
    """The system's service manager can't be asked, or refused what was asked of it."""

    code = "service_manager_failed"
    default_hint = "`localllm serve` runs the same server in this terminal"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a program answered: its exit code (127: it is not installed) and what it wrote."""

    code: int
    out: str
    err: str = ""


# Runs a program and waits for it: the only way from here to the system. Tests hand in recorded answers.
Call = Callable[[Sequence[str]], CommandResult]


@dataclass(frozen=True, slots=True)
class Service:
    """`command` runs the server in the foreground; `settle` waits for the workers that a killed server left. `addresses`:
    what the manager may listen on in its place (`127.0.0.1:11535`, `[::1]:11535`, or a Unix socket's path).
    `memory_max_bytes` None = no limit of its own."""

    command: tuple[str, ...]
    settle: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: Path | None = None
    memory_max_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class State:
    """How the service stands. `since` is the manager's own words; `restarts` None where the manager does not count them;
    `last_exit` is 0 or None after a clean end. `memory_bytes`: of the server and its workers together."""

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
        ...

    def files(self, service: Service) -> dict[Path, str]:
        """What `install` writes: each file and its text."""
        ...

    def install(self, service: Service) -> list[Path]:
        """Write the files, start the service now and at each login; returns the files that changed. Raises ServiceError."""
        ...

    def restart(self) -> None:
        """Stop it, waiting for it to write what it knows, and start it again. Raises ServiceError."""
        ...

    def uninstall(self) -> list[Path]:
        """Stop it and take its files away; returns them. Nothing else is removed. Raises ServiceError."""
        ...

    def state(self) -> State:
        """How it stands now. Raises ServiceError where the manager does not answer."""
        ...

    def log_command(self, lines: int, follow: bool) -> list[str] | Path:
        """What shows the log: a program, or the file that holds it."""
        ...
