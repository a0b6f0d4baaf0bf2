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
from localllm.server.http.asgi import App
from localllm.server.http.connections import Connection, Connections, free_descriptors
from localllm.server.http.settings import ServerSettings

GRACE_S = 5
_TURN_S = 0.001
_WAITING = 256


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers. The command line handles Ctrl-C."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


async def serve_on(
    app: App, socks: Sequence[socket.socket], settings: ServerSettings, *, quiet: bool = False
) -> None:
    """Serve on `socks` until cancelled. Open streams get GRACE_S seconds to end."""
    # While another thread computes, the event loop waits up to this long for each turn. Python's
    # default of 5 ms is as long as one step of a small model.
    sys.setswitchinterval(_TURN_S)
    descriptors = free_descriptors()

    class Counted(Connection):
        all = Connections(settings, descriptors)

    config = uvicorn.Config(
        app,
        http=Counted,
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
    if settings.tls is not None:
        config.ssl_certfile = settings.tls.certificate
        config.ssl_keyfile = settings.tls.key
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
