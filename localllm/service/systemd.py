"""systemd: a user unit for the server and one for its socket, which systemd keeps open while the
server restarts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.errors import UsageError
from localllm.service.types import (
    NAME,
    Call,
    CommandResult,
    Service,
    ServiceError,
    State,
    checked,
    output_of,
    remove_all,
    write_all,
)
from localllm.service.types import call as run_program

SERVICE = f"{NAME}.service"
SOCKET = f"{NAME}.socket"
# Characters that a unit's argument may contain unquoted. `%` and `$` always have a meaning for
# systemd.
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=@+,")
# The first version that increases the delay after each failure (RestartSteps=). Older versions warn
# about the unknown option.
_BACKS_OFF = 254
_UNSET = str(2**64 - 1)
_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "MainPID", "NRestarts", "Result", "ExecMainStatus",
    "MemoryCurrent",
    "ActiveEnterTimestamp", "UnitFileState",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Systemd:
    """The user's systemd; `config_home` is $XDG_CONFIG_HOME. `call` runs systemctl."""

    config_home: Path
    call: Call = run_program
    name: str = "systemd"

    @property
    def folder(self) -> Path:
        return self.config_home / "systemd" / "user"

    def files(self, service: Service) -> dict[Path, str]:
        """The units of `service`, as this machine's systemd understands them."""
        backs_off = self._version() >= _BACKS_OFF
        units = {self.folder / SERVICE: service_unit(service, backs_off=backs_off)}
        if service.addresses:
            units[self.folder / SOCKET] = socket_unit(service)
        return units

    def install(self, service: Service) -> list[Path]:
        """Write the units and start them. If the socket changes, first stop the service and the old
        socket."""
        self._ask("is-system-running", may_fail=True)  # fails if systemd does not answer
        units = self.files(service)
        socket = self.folder / SOCKET
        had_socket = socket.exists()
        changed = write_all(units)
        if had_socket and (socket not in units or socket in changed):
            # The socket can't change while the server has it.
            self._ask("stop", SERVICE, SOCKET)
        if had_socket and socket not in units:
            self._ask("disable", SOCKET)
            changed += remove_all([socket])
        self._ask("daemon-reload")
        if service.addresses:
            self._ask("enable", SERVICE, SOCKET)
            self._ask("start", SOCKET)
        else:
            self._ask("enable", SERVICE)
        self._ask("restart", SERVICE)
        return changed

    def restart(self) -> None:
        """Restart the service. Its socket stays open: new connections wait for the new server."""
        self._ask("reset-failed", SERVICE, may_fail=True)
        self._ask("restart", SERVICE)

    def stop(self) -> None:
        """Stop the service and its socket, which would start it again. Both stay enabled."""
        units = [SERVICE]
        if (self.folder / SOCKET).exists():
            units.append(SOCKET)
        self._ask("stop", *units)

    def uninstall(self) -> list[Path]:
        there = [name for name in (SOCKET, SERVICE) if (self.folder / name).exists()]
        if there:
            self._ask("disable", "--now", *there)
        gone = remove_all([self.folder / name for name in there])
        if gone:
            self._ask("daemon-reload")
            self._ask("reset-failed", SERVICE, may_fail=True)
        return gone

    def state(self) -> State:
        """Read the state from `systemctl show`, whose output does not depend on the language."""
        return parse_show(self._ask("show", SERVICE, f"--property={','.join(_PROPERTIES)}").stdout)

    def log_command(self, lines: int, follow: bool) -> list[str]:
        """Return the command that shows the journal.

        It includes the server's messages and systemd's messages about it (`+` is "or",
        journalctl(1)).
        """
        words = ["journalctl", f"--lines={lines}", "--no-pager"]
        words += ["--quiet", "--output=short-iso"]  # quiet: no hint about other users' messages
        if follow:
            words.append("--follow")
        words += [f"SYSLOG_IDENTIFIER={NAME}", "+", f"_SYSTEMD_USER_UNIT={SERVICE}"]
        return [*words, "+", f"USER_UNIT={SERVICE}"]

    def _version(self) -> int:
        found = re.match(r"systemd (\d+)", self.call(["systemctl", "--version"]).stdout)
        if found:
            return int(found[1])
        return 0

    def _ask(self, *words: str, may_fail: bool = False) -> CommandResult:
        answer = self.call(["systemctl", "--user", *words])
        if "Failed to connect to bus" in output_of(answer):
            raise ServiceError(
                f"systemd does not answer for this user: {output_of(answer)}",
                hint=(
                    "log in as this user (not through su or sudo), or run once: `sudo "
                    "loginctl enable-linger $USER`"
                ),
            )
        if may_fail:
            return answer
        return checked(answer)


def service_unit(service: Service, *, backs_off: bool) -> str:
    """Return the unit of the server.

    Source: https://www.freedesktop.org/software/systemd/man/latest/systemd.service.html

    `KillMode=process`: only the server is told to stop. Its workers save their data, and end when
    the server tells them to or has ended. `mixed` would kill the workers at once if the server was
    killed. In that case a conversation of 1,260 tokens had to be computed again.

    `ExecStopPost`: waits for the workers, and kills those that do not end.

    `OOMPolicy=continue`: if a worker is killed for lack of memory, only its model's requests fail.
    The server continues.

    The server is not restarted after exit codes 2 to 5: wrong usage, a model that is missing,
    unreadable or does not fit. The next try would fail in the same way.
    """
    needs = settle = variables = steps = limit = ""
    if service.addresses:
        needs = f"Requires={SOCKET}\nAfter={SOCKET}\n"
    if service.settle:
        settle = f"ExecStopPost=-{_line(service.settle)}\n"
    for name, value in sorted(service.environment.items()):
        variables += f"Environment={_quoted(f'{name}={value}')}\n"
    if backs_off:
        steps = "RestartSteps=6\nRestartMaxDelaySec=60\n"
    if service.memory_max_bytes is not None:
        limit = f"MemoryMax={service.memory_max_bytes}\n"
    return f"""\
[Unit]
Description=Language models on this machine (localllm)
{needs}StartLimitIntervalSec=600
StartLimitBurst=20

[Service]
ExecStart={_line(service.command)}
{settle}{variables}Restart=on-failure
RestartSec=2
{steps}RestartPreventExitStatus=2 3 4 5
KillMode=process
TimeoutStopSec=30
OOMPolicy=continue
TasksMax=1024
LimitCORE=0
SyslogIdentifier={NAME}
{limit}NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def socket_unit(service: Service) -> str:
    """Return the unit of the listening socket. systemd binds it and keeps it open during restarts."""
    listen = "".join(
        f"ListenStream={address.replace('%', '%%')}\n" for address in service.addresses
    )
    return f"""\
[Unit]
Description=The address of localllm

[Socket]
{listen}SocketMode=0600
RemoveOnStop=yes
NoDelay=yes

[Install]
WantedBy=sockets.target
"""


def parse_show(text: str) -> State:
    answer = dict.fromkeys(_PROPERTIES, "")
    for line in text.splitlines():
        name, _, value = line.partition("=")
        answer[name] = value
    detail = _detail(answer["ActiveState"], answer["SubState"], answer["Result"])
    state = State(
        installed=answer["LoadState"] not in ("", "not-found"),
        running=answer["ActiveState"] in ("active", "reloading"),
        detail=detail,
        pid=_number(answer["MainPID"]) or None,
        since=answer["ActiveEnterTimestamp"],
        restarts=_number(answer["NRestarts"]),
        last_exit=_number(answer["ExecMainStatus"]),
        memory_bytes=_number(answer["MemoryCurrent"]),
    )
    if answer["UnitFileState"]:
        return replace(state, at_login=answer["UnitFileState"] == "enabled")
    return state


def _detail(state: str, sub_state: str, result: str) -> str:
    """Format the state as systemd does: "failed (failed) exit-code"."""
    words = [state] if state else []
    if sub_state:
        words.append(f"({sub_state})")
    if result not in ("", "success"):
        words.append(result)
    return " ".join(words)


def _number(text: str) -> int | None:
    if text.isdecimal() and text != _UNSET:
        return int(text)
    return None


def _line(command: Sequence[str]) -> str:
    return " ".join(_quoted(word, command=True) for word in command)


def _quoted(word: str, *, command: bool = False) -> str:
    """Quote `word` as one argument of ExecStart, or as one assignment of Environment.

    `$` has no special meaning in Environment (systemd.syntax(7)).
    """
    if "\n" in word or "\0" in word:
        raise UsageError("a unit's command can't contain a line break")
    escaped = word.replace("%", "%%")
    if command:
        escaped = escaped.replace("$", "$$")
    if word and set(word) <= _PLAIN:
        return escaped
    body = escaped.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{body}"'
