"""Listens: takes the port before anything loads, runs uvicorn, and stops cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalLLMError, PortInUseError, UsageError
from localllm.server.security import App

_GRACE_S = 5
_HEADER_TIMEOUT_S = 15.0


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


class _Protocol(H11Protocol):
    """uvicorn's HTTP, plus what it lacks: a connection that does not finish its headers in time is closed, and small
    frames leave at once."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = self.loop.call_later(_HEADER_TIMEOUT_S, self._slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Bytes of a head that is not whole yet: h11 keeps them and has seen no request.
        started = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not started and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif started and self._deadline is None:
            self._deadline = self.loop.call_later(_HEADER_TIMEOUT_S, self._slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the command line decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def serve_on(app: App, sock: socket.socket, *, quiet: bool = False) -> None:
    """Serve until cancelled; open streams get a few seconds to end. Prompts are never logged."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level=logging.CRITICAL if quiet else logging.WARNING,
        timeout_graceful_shutdown=_GRACE_S,
        timeout_keep_alive=75,
        limit_concurrency=512,
        server_header=False,
        date_header=False,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait({task}, timeout=_GRACE_S + 2)
        raise
    finally:
        sock.close()
    if not server.started:
        raise LocalLLMError("the HTTP server did not start")


def serve(app: App, host: str = "127.0.0.1", port: int = 11535) -> None:
    """Bind and serve until Ctrl-C. Raises PortInUseError before anything else happens."""
    sock = bind(host, port)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_on(app, sock))
