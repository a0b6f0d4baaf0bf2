"""Parts of `localllm service`: the server's command, its addresses, its manager.

Also waits until the server answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO, TypeAlias, cast

import psutil

from localllm import paths
from localllm.addresses import is_address
from localllm.cli.serve.running import START_TOLERANCE_S, running_servers
from localllm.errors import UsageError
from localllm.formatting import gb
from localllm.plain_output import PlainOutput
from localllm.server.http.sockets import has_ipv6_loopback
from localllm.service.launchd import Launchd
from localllm.service.systemd import Systemd
from localllm.service.types import Service, ServiceError, State
from localllm.service.windows import WindowsTasks
from localllm.setting_table import TABLE
from localllm.settings import Settings

Manager: TypeAlias = Systemd | Launchd | WindowsTasks

# Locations. With other values than in the terminal, the server would find other models and
# settings.
LOCATION_VARIABLES = (
    "LOCALLLM_CONFIG_DIR", "LOCALLLM_DATA_DIR", "LOCALLLM_CACHE_DIR", "LOCALLLM_LOG_DIR", "HF_HOME",
    "HF_HUB_CACHE",
    "OLLAMA_MODELS",
)  # fmt: skip
_MANAGERS = {"linux": "systemd", "darwin": "launchd", "win32": "task-scheduler"}
_START_TIMEOUT_S = 60.0
# Less than the stop timeout of the unit (service/systemd.py: TimeoutStopSec).
_SAVE_TIMEOUT_S = 25.0


def listen_streams(settings: Settings) -> tuple[str, ...]:
    """Return the listening addresses of a server in systemd's format.

    Returns an empty tuple if the host must be resolved or if any port will do.
    """
    unix = settings.value("unix_socket")
    host = settings.value("host")
    port = settings.value("port")
    if unix:
        return (str(Path(unix).expanduser().absolute()),)
    hosts = [host]
    if host.lower() == "localhost":
        hosts = ["127.0.0.1"]
        if has_ipv6_loopback():
            hosts.append("::1")
    if port == 0 or not all(map(is_address, hosts)):
        return ()
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def service_of(
    models: Sequence[str], settings: Settings, manager: str, memory_gb: float | None = None
) -> Service:
    """Return the service that serves `models` with `settings`, as input for `manager`."""
    environment = {name: os.environ[name] for name in LOCATION_VARIABLES if os.environ.get(name)}
    if memory_gb is not None and manager != "systemd":
        raise UsageError(
            f"--memory-gb: {manager} can't limit memory",
            hint="omit it; the plan stays within free memory anyway",
        )
    if memory_gb is not None and not 0.5 <= memory_gb < 1e6:
        raise UsageError(f"--memory-gb must be at least 0.5, not {memory_gb:g}")
    socket_options = []
    if settings["unix_socket"].origin == "flag":
        path = Path(settings.value("unix_socket")).expanduser().absolute()
        socket_options = ["--unix", str(path)]
    model_arguments = [_as_absolute_path(model) for model in models]
    program = [sys.executable, "-m", "localllm", "serve"]
    if manager == "task-scheduler":
        program = [_without_window(sys.executable), "-m", "localllm", "service", "run"]
        program += ["--log", str(_log_path())]
        for name, value in environment.items():
            program += ["--set", f"{name}={value}"]
    return Service(
        command=(*program, *socket_options, *model_arguments),
        settle=(sys.executable, "-m", "localllm", "service", "settle"),
        addresses=listen_streams(settings),
        environment=environment,
        memory_max_bytes=None if memory_gb is None else int(memory_gb * 1e9),
    )


def _as_absolute_path(model: str) -> str:
    """Return `model` as an absolute path if it is an existing path."""
    path = Path(model).expanduser()
    if path.exists():
        return str(path.resolve())
    return model


def settings_of_this_terminal() -> list[str]:
    """Return environment variables that are settings. A manager starts the server without them."""

    return [setting.env for setting in TABLE if setting.env in os.environ]


def manager_named(name: str | None) -> Manager:
    """Return the service manager of that name, or this system's. Raises UsageError for unknown
    ones."""
    name = name or _MANAGERS.get(sys.platform)
    if name not in _MANAGERS.values():
        known_names = ", ".join(_MANAGERS.values())
        raise UsageError(
            f"the service manager must be one of {known_names}, not {name or sys.platform!r}",
            hint="choose one with --manager",
        )
    if name == "systemd":
        return Systemd(Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser())
    if name == "launchd":
        return Launchd(Path.home(), os.getuid() if hasattr(os, "getuid") else 0, _log_path())
    user = "\\".join(filter(None, [os.environ.get("USERDOMAIN"), os.environ.get("USERNAME")]))
    return WindowsTasks(paths.data_dir(), user, _log_path())


def wait_until_it_listens(started_s: float) -> str:
    """Wait until the server listens, and return its address.

    `started_s`: the time at which the manager was told to start it, in seconds since 1970. Raises
    ServiceError after a minute.
    """
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        for server in running_servers():
            if server.started_s > started_s - START_TOLERANCE_S:
                return server.address
        time.sleep(0.2)
    raise ServiceError(
        "the service was started but does not listen",
        hint="`localllm service logs` shows the reason",
    )


def state_lines(state: State, address: str | None) -> list[str]:
    """Describe the service's state for display. `address`: the server's address, if known."""
    if not state.installed:
        return ["not installed: `localllm service install` starts the server now and at each login"]
    state_text = "running" if state.running else "not running"
    if state.detail:
        state_text += f": {state.detail}"
    lines = [f"state           {state_text}"]
    if address:
        lines.append(f"address         {address}")
    if state.since:
        lines.append(f"since           {state.since}")
    if state.pid:
        lines.append(f"process         {state.pid}")
    if state.memory_bytes is not None:
        memory = gb(state.memory_bytes, 2)
        lines.append(
            f"memory          {memory}, including the part of the model's file that was read"
        )
    if state.restarts is not None:
        lines.append(f"restarts        {state.restarts}")
    if state.last_exit and not state.running:
        lines.append(f"last exit code  {state.last_exit}")
    if state.at_login is not None:
        lines.append(f"at login        {'yes' if state.at_login else 'no'}")
    return lines


def show_log(command: Sequence[str]) -> None:
    """Run the command that shows the server's log. Raises ServiceError."""
    try:
        exit_code = subprocess.run(command, check=False).returncode
    except FileNotFoundError as e:
        raise ServiceError(f"{command[0]} is not installed") from e
    if exit_code:
        raise ServiceError(
            f"`{' '.join(command)}` failed ({exit_code})",
            hint="only some users may read a journal in memory: `sudo usermod -aG "
            "systemd-journal $USER`, and log in again",
        )


def redirect_output(log: str) -> None:
    """Redirect stdout and stderr of this process to the file `log`.

    A file of over 10 MB is renamed to `.1` first.
    """
    path = Path(log)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > 10_000_000:
        path.replace(path.with_name(path.name + ".1"))
    stream = path.open("a", buffering=1, encoding="utf-8", errors="replace")
    # Children inherit the file descriptors, if the process has any (pythonw.exe lacks them).
    for descriptor in (1, 2):
        os.dup2(stream.fileno(), descriptor)
    sys.stdout = sys.stderr = cast("TextIO", PlainOutput(stream))


def wait_for_workers(longest_s: float = _SAVE_TIMEOUT_S) -> int:
    """Wait until all workers of this run of the unit have ended. After `longest_s`, kill the rest.

    Returns the number of killed workers. Their environment has the same systemd invocation ID as
    this process.
    """
    invocation = os.environ.get("INVOCATION_ID")
    if not invocation:
        return 0
    workers = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("INVOCATION_ID") == invocation:
                workers.append(process)
        except psutil.Error:
            continue
    _, n_left = psutil.wait_procs(workers, timeout=longest_s)
    for process in n_left:
        with suppress(psutil.Error):
            process.kill()
    return len(n_left)


def _log_path() -> Path:
    return paths.log_dir() / "serve.log"


def _without_window(python: str) -> str:
    """Return pythonw.exe in the folder of python.exe, if it exists: it opens no console."""
    windowless = Path(python).with_name("pythonw.exe")
    if windowless.exists():
        return str(windowless)
    return python
