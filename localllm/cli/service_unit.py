"""What `localllm service` puts together: the server's command, its addresses, its manager; and
waiting until it answers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from localllm import paths
from localllm.cli.serve.running import running
from localllm.errors import UsageError
from localllm.plain_output import PlainOutput
from localllm.settings import TABLE, Settings

if TYPE_CHECKING:
    from localllm.service.types import Manager, Service

# Where things lie: a server that looked elsewhere than the terminal does would have other models
# and settings.
CARRIED = (
    "LOCALLLM_CONFIG_DIR", "LOCALLLM_DATA_DIR", "LOCALLLM_CACHE_DIR", "LOCALLLM_LOG_DIR", "HF_HOME",
    "HF_HUB_CACHE",
    "OLLAMA_MODELS",
)  # fmt: skip
_LONGEST_START_S = 60.0
# Less than the unit gives to ending (service/systemd.py: TimeoutStopSec).
_LONGEST_WRITE_S = 25.0


@dataclass(frozen=True, slots=True)
class ListenAddresses:
    """Where the server listens: `hosts` with one `port`, or the Unix socket `unix`."""

    hosts: tuple[str, ...]
    port: int
    unix: Path | None = None

    @property
    def streams(self) -> tuple[str, ...]:
        """As systemd writes them; none where the system's resolver has a say, or any port would
        do."""
        from localllm.server.http.settings import is_address

        if self.unix is not None:
            return (str(self.unix),)
        if self.port == 0 or not all(is_address(host) for host in self.hosts):
            return ()
        return tuple(
            f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in self.hosts
        )


def listen_addresses(settings: Settings) -> ListenAddresses:
    """Where a server with `settings` listens."""
    from localllm.server.http.sockets import has_ipv6_loopback

    unix = settings.value("unix_socket")
    host = settings.value("host")
    hosts: tuple[str, ...] = (host,)
    if host.lower() == "localhost":
        hosts = ("127.0.0.1", "::1") if has_ipv6_loopback() else ("127.0.0.1",)
    return ListenAddresses(
        hosts, settings.value("port"), Path(unix).expanduser().absolute() if unix else None
    )


def service_of(
    models: Sequence[str], settings: Settings, manager: str, memory_max_bytes: int | None
) -> Service:
    """The service that serves `models` by `settings`, as `manager` has to be told."""
    from localllm.service.types import Service

    environment = {name: os.environ[name] for name in CARRIED if os.environ.get(name)}
    if memory_max_bytes is not None and manager != "systemd":
        raise UsageError(
            f"--memory-gb: {manager} sets no limit",
            hint="leave it out; the plan keeps to free memory",
        )
    flag = settings["unix_socket"].origin == "flag"
    socket = (
        ["--unix", str(Path(settings.value("unix_socket")).expanduser().absolute())] if flag else []
    )
    named = [
        str(Path(m).expanduser().resolve()) if Path(m).expanduser().exists() else m for m in models
    ]
    program = [sys.executable, "-m", "localllm", "serve"]
    if manager == "task-scheduler":
        variables = [
            word for name, value in environment.items() for word in ("--set", f"{name}={value}")
        ]
        program = [
            _without_window(sys.executable),
            "-m",
            "localllm",
            "service",
            "run",
            "--log",
            str(_log()),
            *variables,
        ]
    return Service(
        command=(*program, *socket, *named),
        settle=(sys.executable, "-m", "localllm", "service", "settle"),
        addresses=listen_addresses(settings).streams,
        environment=environment,
        log_file=_log(),
        memory_max_bytes=memory_max_bytes,
    )


def settings_of_this_terminal() -> list[str]:
    """Variables of this environment that are settings: a manager starts the server without them."""

    return [setting.env for setting in TABLE if setting.env in os.environ]


def memory_bytes(gb: float | None) -> int | None:
    """`gb` in bytes. Raises UsageError for what no server can run in."""
    if gb is None:
        return None
    if not 0.5 <= gb < 1e6:
        raise UsageError(f"--memory-gb must be at least 0.5, not {gb:g}")
    return int(gb * 1e9)


def manager_named(name: str) -> Manager:
    if name == "systemd":
        from localllm.service.systemd import Systemd

        return Systemd(Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser())
    if name == "launchd":
        from localllm.service.launchd import Launchd

        return Launchd(Path.home(), os.getuid() if hasattr(os, "getuid") else 0, _log())
    from localllm.service.windows import WindowsTasks

    user = "\\".join(filter(None, [os.environ.get("USERDOMAIN"), os.environ.get("USERNAME")]))
    return WindowsTasks(paths.data_dir(), user, _log())


def port_is_free(settings: Settings) -> None:
    """Raises PortInUseError where another program has the server's address: the manager would only
    say that it failed."""
    from localllm.cli.serve.listening import server_settings
    from localllm.server.http.sockets import bind, bind_unix

    secured = server_settings(settings)
    if secured.unix_socket is not None:
        path = Path(secured.unix_socket).expanduser()
        bind_unix(path).close()
        path.unlink(missing_ok=True)
        return
    for sock in bind(secured.host, secured.port):
        sock.close()


def wait_until_it_answers(addresses: ListenAddresses, settings: Settings) -> str:
    """Ask the server for its health until it answers, and return its address. Raises ServiceError
    after a minute."""

    import httpx

    from localllm.service.types import ServiceError

    scheme = "https" if settings.value("tls_cert") else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(addresses.hosts[0], addresses.hosts[0])
    base = f"{scheme}://{f'[{host}]' if ':' in host else host}:{addresses.port}"
    uds = str(addresses.unix) if addresses.unix is not None else None
    until = time.monotonic() + _LONGEST_START_S
    # The certificate is the user's own affair here: it is this machine that is asked whether it
    # answers at all.
    transport = httpx.HTTPTransport(uds=uds, verify=False)
    with httpx.Client(
        transport=transport, base_url=base if uds is None else "http://localhost"
    ) as client:
        while True:
            try:
                client.get("/health", timeout=max(until - time.monotonic(), 0.1))
            except httpx.TransportError as e:
                if time.monotonic() >= until:
                    raise ServiceError(
                        f"the service was started, and does not answer: {e}",
                        hint="`localllm service logs` says why",
                    ) from e
                time.sleep(0.2)
            else:
                return f"{base}/v1" if uds is None else f"the Unix socket {uds}"


def address_of(pid: int | None) -> str | None:
    """Where the server that is process `pid` answers, as it tells itself; None while it has not
    told."""

    for server in running():
        if server.pid == pid:
            return (
                f"the Unix socket {server.unix_socket}" if server.unix_socket else server.base_url
            )
    return None


def show_log(command: Sequence[str]) -> None:
    """Run what shows the server's log. Raises ServiceError."""
    from localllm.service.types import ServiceError

    try:
        code = subprocess.run(command, check=False).returncode
    except FileNotFoundError as e:
        raise ServiceError(f"{command[0]} is not installed") from e
    if code:
        raise ServiceError(
            f"`{' '.join(command)}` failed ({code})",
            hint="a journal that is kept in memory only is not for every user to read: "
            "`sudo usermod -aG systemd-journal $USER`, and log in again",
        )


def write_to(log: str) -> None:
    """From now on stdout and stderr of this process are the file `log`; one of over 10 MB is kept
    as `.1` first."""
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > 10_000_000:
        path.replace(path.with_name(path.name + ".1"))
    stream = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    # Children inherit the descriptors, where the process has any (pythonw.exe has none).
    for number in (1, 2):
        os.dup2(stream.fileno(), number)
    sys.stdout = sys.stderr = cast("TextIO", PlainOutput(stream))


def wait_for_workers(longest_s: float = _LONGEST_WRITE_S) -> int:
    """Wait until no worker of this run of the unit is left; after `longest_s` end those that are,
    and return their number.

    They are known by systemd's name of the run, which all of its processes have in their
    environment."""
    import psutil

    run = os.environ.get("INVOCATION_ID")
    if not run:
        return 0
    ours = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("INVOCATION_ID") == run:
                ours.append(process)
        except psutil.Error:
            continue
    _, left = psutil.wait_procs(ours, timeout=longest_s)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    return len(left)


def _log() -> Path:
    return paths.log_dir() / "serve.log"


def _without_window(python: str) -> str:
    """pythonw.exe beside python.exe, where there is one: it opens no console."""
    windowless = Path(python).with_name("pythonw.exe")
    return str(windowless) if windowless.exists() else python
