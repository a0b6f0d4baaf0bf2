"""Takes the port or the socket file before anything loads; imports nothing that serves.

A port that is in use is said at once, and the engine's process is on its way before the web server's code is read.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from localllm.errors import PortInUseError, UsageError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket on `host:port` (0 = any free port). Raises PortInUseError or UsageError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as e:
        raise UsageError(f"{host!r} is not an address of this machine: {e.strerror or e}") from e
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    if os.name == "posix":
        # Elsewhere this option would let two servers share the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(256)
    except OSError as e:
        sock.close()
        if e.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is in use" if e.errno == errno.EADDRINUSE else "needs administrator rights"
            raise PortInUseError(f"port {port} on {host} {why}") from e
        raise UsageError(f"can't listen on {host}:{port}: {e.strerror}") from e
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A listening Unix socket that only this user can open. Replaces a dead one, refuses a live one.

    Raises PortInUseError, or UsageError for a path that can't be one."""
    if not hasattr(socket, "AF_UNIX"):
        raise UsageError("this system has no Unix sockets", hint="listen on a port: --port")
    if path.exists():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"{path.name} exists and is not a socket")
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
        else:
            raise PortInUseError(f"another program listens on the socket {path.name}")
        finally:
            probe.close()
    sock = socket.socket(socket.AF_UNIX)
    old = os.umask(0o177)
    try:
        sock.bind(str(path))
        sock.listen(256)
    except OSError as e:
        sock.close()
        raise UsageError(f"can't listen on the socket {path.name}: {e.strerror or e}") from e
    finally:
        os.umask(old)
    return sock
