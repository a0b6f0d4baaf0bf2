"""The servers that run on this machine, as they tell of themselves: a small private file each, for
as long as they run."""

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

# Where a client finds the key: none is asked for, the one that is kept (api_keys.py), or one
# somebody chose.
Key = Literal["none", "kept", "chosen"]
# The start of a process is known to hundredths of a second, and computed from the boot's.
SAME_START_S = 2.0
_LONGEST_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Running:
    """`base_url` ends in /v1; `unix_socket` is a path where the server listens on one, else "".
    `started_s` is the process's start (seconds since 1970): with `pid` and `host` it tells this
    process from a later one of that number."""

    base_url: str
    pid: int
    started_s: float
    host: str
    key: Key = "none"
    unix_socket: str = ""

    @property
    def address(self) -> str:
        """Where it listens, for people."""
        if self.unix_socket:
            return f"the Unix socket {self.unix_socket}"
        return self.base_url


def folder() -> Path:
    return paths.cache_dir() / "servers"


@contextmanager
def published(settings: ServerSettings, port: int) -> Iterator[None]:
    """Tell of this process's server, which listens on `port`, for as long as the block runs. A disk
    that refuses keeps no server from running."""
    file = folder() / f"{os.getpid()}.json"
    json_store.keep(file, asdict(_of(settings, port)))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink()


def running() -> list[Running]:
    """The servers of this user that run on this machine, the newest first; what dead ones left
    behind is removed."""
    try:
        files = sorted(folder().glob("*.json"))
    except OSError:
        return []
    found = []
    for file in files:
        server = _read(file)
        if server is None or server.host != socket.gethostname():
            continue  # another machine's, where the folder is on a shared disk
        if _lives(server):
            found.append(server)
        else:
            with suppress(OSError):
                file.unlink()
    return sorted(found, key=attrgetter("started_s"), reverse=True)


def _of(settings: ServerSettings, port: int) -> Running:
    import psutil

    key: Key = "chosen"
    if settings.api_key is None:
        key = "none"
    elif settings.generated_key:
        key = "kept"
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{_reached_at(settings.host)}:{port}/v1"
    path = ""
    if settings.unix_socket:
        url = "http://localhost/v1"
        path = str(Path(settings.unix_socket).expanduser().resolve())
    return Running(
        url, os.getpid(), psutil.Process().create_time(), socket.gethostname(), key, path
    )


def _reached_at(host: str) -> str:
    """How this machine itself reaches a server that listens on `host`."""
    if host in ("0.0.0.0", "localhost"):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    if ":" in host:
        return f"[{host}]"
    return host


def _read(file: Path) -> Running | None:
    """What a file tells; None for one that others could have written, or that says something
    else."""
    try:
        with file.open("rb") as f:
            about = os.fstat(f.fileno())
            if os.name == "posix" and (about.st_uid != os.getuid() or about.st_mode & 0o077):
                return None
            server = json_store.record(Running, json.loads(f.read(_LONGEST_FILE_BYTES)))
    except (OSError, ValueError):
        return None
    if server is None or server.key in ("none", "kept"):
        return server
    return replace(server, key="chosen")


def _lives(server: Running) -> bool:
    import psutil

    try:
        process = psutil.Process(server.pid)
        if abs(process.create_time() - server.started_s) >= SAME_START_S:
            return False
        return process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError):
        return False
