"""Connections with TLS. A handshake is counted and limited as a connection without access is.

uvicorn and asyncio would first finish the handshake. Any number of silent handshakes could then hold
all file descriptors for a minute."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from localllm.server.http.connections import Connection
from localllm.server.http.settings import TlsFiles

# Longest wait for the client's end of the TLS session when a connection is closed.
_SHUTDOWN_S = 5.0


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the server's TLS context. `check_tls` has checked the files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    return context


class TlsConnection(Connection):
    """A connection that begins with a handshake."""

    context: ssl.SSLContext
    _handshake: asyncio.Task[None] | None = None
    # Data that the client sent with the end of its handshake.
    _early: list[bytes]
    _is_open = False

    def connection_made(self, transport: Any) -> None:
        self._early = []
        self.transport = transport
        # No data may be read before the handshake's protocol is in place.
        transport.pause_reading()
        self.began(transport)
        self._handshake = self.loop.create_task(self._shake_hands(transport))

    async def _shake_hands(self, transport: Any) -> None:
        try:
            opened = await self.loop.start_tls(
                transport,
                self,
                self.context,
                server_side=True,
                ssl_handshake_timeout=self.all.settings.header_timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        except OSError:
            opened = None
        if opened is None:  # the client has gone, or was closed for another one
            self.lost()
            transport.abort()
            return
        self._is_open = True
        super().connection_made(opened)
        for data in self._early:
            super().data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._is_open:
            super().data_received(data)
        else:
            self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_open:
            super().connection_lost(exc)
        else:
            self.lost()
