"""Runs uvicorn on a listening socket and stops it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.errors import LocalLLMError
from localllm.server.http.asgi import App, Receive, Scope, Send
from localllm.server.http.gate import CROWDED
from localllm.server.http.settings import ServerSettings
from localllm.server.http.streaming import OWN_SEND

GRACE_S = 5
_KEEP_ALIVE_S = 75


class _Protocol(H11Protocol):
    """uvicorn's HTTP with a timeout for request headers, and TCP_NODELAY."""

    header_timeout_s: float
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._deadline = self.loop.call_later(self.header_timeout_s, self._slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Incomplete headers: h11 holds their bytes and has seen no request.
        started = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not started and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif started and self._deadline is None:
            self._deadline = self.loop.call_later(self.header_timeout_s, self._slow)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _slow(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command line handles Ctrl-C."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def serve_on(app: App, socks: Sequence[socket.socket], settings: ServerSettings, *, quiet: bool = False) -> None:
    """Serve on `socks` until cancelled; open streams get a few seconds to end."""

    async def outermost(scope: Scope, receive: Receive, send: Send) -> None:
        scope[OWN_SEND] = send
        scope[CROWDED] = len(server.server_state.connections) > settings.max_connections
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            # The client was told (streaming.py, app.py); uvicorn would log the whole stack.
            if not server.should_exit:
                raise

    class Protocol(_Protocol):
        header_timeout_s = settings.header_timeout_s

    config = uvicorn.Config(
        outermost,
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level=logging.CRITICAL if quiet else logging.WARNING,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        date_header=False,
        ssl_certfile=settings.tls.certificate if settings.tls is not None else None,
        ssl_keyfile=settings.tls.key if settings.tls is not None else None,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=list(socks)))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await asyncio.wait({task}, timeout=GRACE_S + 2)
        raise
    finally:
        for sock in socks:
            sock.close()
    if not server.started:
        raise LocalLLMError("the HTTP server did not start")
