"""launchd: an agent of this user on macOS. Written from its manual; we have not run it on a Mac."""

from __future__ import annotations

import plistlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localllm.service.types import (
    Call,
    CommandResult,
    Service,
    State,
    checked,
    remove_all,
    write_all,
)
from localllm.service.types import call as run_program

LABEL = "org.localllm.serve"
# launchctl(1): exit codes for a service that does not exist, and for one that is still stopping
# (`bootout` does not wait).
_NO_SUCH = (3, 113)
_STILL_LEAVING = (5, 37)
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Launchd:
    """The launchd of the user with the number `uid`. `call` runs launchctl; `wait` sleeps for some
    seconds."""

    home: Path
    uid: int
    log_file: Path
    call: Call = run_program
    wait: Callable[[float], None] = time.sleep
    name: str = "launchd"

    @property
    def plist(self) -> Path:
        return self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def files(self, service: Service) -> dict[Path, str]:
        return {self.plist: agent(service, self.log_file)}

    def install(self, service: Service) -> list[Path]:
        """Write the agent and start it. It replaces a running one."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        changed = write_all(self.files(service))
        self.stop()
        self._load()
        return changed

    def _load(self) -> None:
        bootstrap = ("bootstrap", f"gui/{self.uid}", str(self.plist))
        for _ in range(_TRIES - 1):
            if not self._ask(*bootstrap, allowed=_STILL_LEAVING).returncode:
                return
            self.wait(1.0)
        self._ask(*bootstrap)

    def restart(self) -> None:
        """Stop the service with SIGTERM and start it again, or load it after `stop`."""
        if self._ask("print", self._target, allowed=_NO_SUCH).returncode:
            self._load()
            return
        self._ask("kickstart", "-k", self._target)

    def stop(self) -> None:
        """Stop the service with SIGTERM. It is loaded again at the next login."""
        self._ask("bootout", self._target, allowed=_NO_SUCH)

    def uninstall(self) -> list[Path]:
        self._ask("bootout", self._target, allowed=_NO_SUCH)
        return remove_all([self.plist])

    def state(self) -> State:
        """Read the state from `launchctl print`."""
        answer = self._ask("print", self._target, allowed=_NO_SUCH)
        if answer.returncode:
            there = self.plist.exists()
            return State(installed=there, detail="not loaded", at_login=there)
        return parse_print(answer.stdout)

    def log_command(self, lines: int, follow: bool) -> list[str]:
        if follow:
            return ["tail", "-n", str(lines), "-F", str(self.log_file)]
        return ["tail", "-n", str(lines), str(self.log_file)]

    @property
    def _target(self) -> str:
        return f"gui/{self.uid}/{LABEL}"

    def _ask(self, *words: str, allowed: tuple[int, ...] = ()) -> CommandResult:
        answer = self.call(["launchctl", *words])
        if answer.returncode in allowed:
            return answer
        return checked(answer)


def agent(service: Service, log_file: Path) -> str:
    """Return the text of a launch agent (launchd.plist(5)).

    `AbandonProcessGroup`: workers save their data after the server has ended, and then end by
    themselves.
    """
    values = {
        "Label": LABEL,
        "ProgramArguments": list(service.command),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": 30,
        "AbandonProcessGroup": True,
        "ProcessType": "Interactive",
        "HardResourceLimits": {"Core": 0},
        "EnvironmentVariables": dict(sorted(service.environment.items())),
        "StandardOutPath": str(log_file),
        "StandardErrorPath": str(log_file),
    }
    return plistlib.dumps(values, sort_keys=False).decode()


def parse_print(text: str) -> State:
    """State from `launchctl print gui/UID/LABEL`: only lines one level deep are the service's
    own."""
    own = dict(re.findall(r"^\t(?! )([a-z ]+) = ([^{\n]*)$", text, re.MULTILINE))
    state = own.get("state", "").strip()
    runs = _integer(own.get("runs", ""))
    restarts: int | None = None
    if runs is not None:
        restarts = max(runs - 1, 0)
    return State(
        installed=True,
        running=state == "running",
        detail=state,
        pid=_integer(own.get("pid", "")),
        restarts=restarts,
        last_exit=_integer(own.get("last exit code", "")),
        at_login=True,
    )


def _integer(text: str) -> int | None:
    """Parse the integer at the beginning of `text`. Returns None for other texts, such as "(never
    exited)"."""
    found = re.match(r"-?\d+", text)
    if found is None:
        return None
    return int(found[0])
