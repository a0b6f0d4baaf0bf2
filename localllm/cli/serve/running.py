"""Files that list the servers running on this machine. Each server keeps a small private file."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from localllm import json_store, paths

if TYPE_CHECKING:
    from localllm.server.http.settings import ServerSettings

# Source of the key for clients: no key is needed, the stored key (api_keys.py), or one chosen by
# the user.
Key = Literal["none", "kept", "chosen"]
# The start time of a process has a resolution of 1/100 s and is derived from the boot time.
START_TOLERANCE_S = 2.0
_MAX_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A running server.

    `base_url`: ends in /v1.
    `unix_socket`: the path of its Unix socket, or "".
    `started_s`: start of the process in seconds since 1970. With `pid` and `host` it distinguishes
    this process from a later one with the same pid.
    """

    base_url: str
    pid: int
    started_s: float
    host: str
    key: Key = "none"
    unix_socket: str = ""

    @property
    def address(self) -> str:
        """The server's address, for display."""
        if self.unix_socket:
            return f"the Unix socket {self.unix_socket}"
        return self.base_url


def folder() -> Path:
    return paths.cache_dir() / "servers"


@contextmanager
def published(settings: ServerSettings, port: int) -> Iterator[None]:
    """Keep the file of this server, which listens on `port`, inside the `with` block.

    The server also runs if the file can't be written.
    """
    file = folder() / f"{os.getpid()}.json"
    json_store.keep(file, asdict(_this_server(settings, port)))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def running_servers() -> list[RunningServer]:
    """Return the running servers of this user on this machine, the newest first.

    Files of servers that no longer run are deleted.
    """
    try:
        files = sorted(paths.regular_files(folder(), "*.json"))
    except OSError:
        return []
    servers = []
    for file in files:
        server = _read(file)
        if server is None or server.host != socket.gethostname():
            continue  # a server of another machine, if the folder is on a shared disk
        if _is_alive(server):
            servers.append(server)
        else:
            with suppress(OSError):
                file.unlink()
    return sorted(servers, key=attrgetter("started_s"), reverse=True)


def _this_server(settings: ServerSettings, port: int) -> RunningServer:
    import psutil

    key: Key = "chosen"
    if settings.api_key is None:
        key = "none"
    elif settings.generated_key:
        key = "kept"
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{_local_host(settings.host)}:{port}/v1"
    path = ""
    if settings.unix_socket:
        url = "http://localhost/v1"
        path = str(Path(settings.unix_socket).expanduser().resolve())
    return RunningServer(
        url, os.getpid(), psutil.Process().create_time(), socket.gethostname(), key, path
    )


def _local_host(host: str) -> str:
    """Return the host that reaches a server listening on `host` from this machine."""
    if host in ("0.0.0.0", "localhost"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    if ":" in host:
        return f"[{host}]"
    return host


def _read(file: Path) -> RunningServer | None:
    """Read one file. Returns None if its content is invalid or if others could have written it."""
    try:
        with file.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if os.name == "posix" and (status.st_uid != os.getuid() or status.st_mode & 0o077):
                return None
            server = json_store.record(RunningServer, json.loads(stream.read(_MAX_FILE_BYTES)))
    except (OSError, ValueError):
        return None
    if server is None or server.key in ("none", "kept"):
        return server
    return replace(server, key="chosen")


def _is_alive(server: RunningServer) -> bool:
    import psutil

    try:
        process = psutil.Process(server.pid)
        if abs(process.create_time() - server.started_s) >= START_TOLERANCE_S:
            return False
        return process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
