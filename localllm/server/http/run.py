"""Runs uvicorn on a listening socket and stops it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvicorn

from localllm.errors import LocalLLMError
from localllm.memory.system import return_large_blocks
from localllm.server.http.asgi import App
from localllm.server.http.connections import Connection, Connections, free_descriptors
from localllm.server.http.settings import ServerSettings
from localllm.server.http.tls_connections import TlsConnection, tls_context

GRACE_S = 5
_TURN_S = 0.001
_WAITING = 256


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers. The command line handles Ctrl-C."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _protocol(settings: ServerSettings, descriptors: int) -> type[Connection]:
    """Return the protocol of a server's connections, which it counts together."""
    shared: dict[str, Any] = {"all": Connections(settings, descriptors)}
    if settings.tls is None:
        return type("Counted", (Connection,), shared)
    shared["context"] = tls_context(settings.tls)
    return type("CountedTls", (TlsConnection,), shared)


async def _close_late(server: uvicorn.Server) -> None:
    """Close connections that were accepted while `server` ended. It no longer knows of them."""
    # Their tasks begin in the first of these turns, and their transports are ready in the second.
    for _ in range(3):
        await asyncio.sleep(0)
    for connection in [*server.server_state.connections]:
        connection.transport.abort()
    await asyncio.sleep(0)


async def _ended(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """Wait until `server` has ended. A second cancellation ends its running answers at once."""
    loop = asyncio.get_running_loop()
    limit_s = loop.time() + GRACE_S + 2
    while not task.done() and loop.time() < limit_s:
        try:
            await asyncio.wait({task}, timeout=limit_s - loop.time())
        except asyncio.CancelledError:
            for answer in server.server_state.tasks:
                answer.cancel()


async def serve_on(
    app: App, socks: Sequence[socket.socket], settings: ServerSettings, *, quiet: bool = False
) -> None:
    """Serve on `socks` until cancelled. Open streams get GRACE_S seconds to end."""
    # While another thread computes, the event loop waits up to this long for each turn. Python's
    # default of 5 ms is as long as one step of a small model.
    sys.setswitchinterval(_TURN_S)
    return_large_blocks()
    descriptors = free_descriptors()

    config = uvicorn.Config(
        app,
        http=_protocol(settings, descriptors),
        backlog=max(1, min(_WAITING, descriptors // 20)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        log_level=logging.CRITICAL if quiet else logging.WARNING,
        timeout_graceful_shutdown=GRACE_S,
        # `Connection` has shorter timeouts.
        timeout_keep_alive=math.ceil(settings.idle_timeout_s + settings.idle_unknown_timeout_s),
        server_header=False,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=list(socks)))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await _ended(server, task)
        raise
    finally:
        for sock in socks:
            sock.close()
        await _close_late(server)
    if not server.started:
        raise LocalLLMError("the HTTP server did not start")
