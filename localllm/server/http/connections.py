"""Limits the number and the lifetime of connections.

A connection is a stranger until one of its requests has passed the gate. Strangers get few
connections and short deadlines; known connections get the rest. If there are too many strangers,
the oldest one is closed when a new one connects, so that any number of strangers cannot lock
out others. Strangers from this machine have their own share. A TLS handshake is a stranger too. An
idle known connection is closed if a newly admitted one needs its place. A request is refused only
if all known connections are busy, or all those that its key may have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from localllm.addresses import is_loopback
from localllm.errors import BusyError
from localllm.server.http.accounts import Account, RateLimitError
from localllm.server.http.asgi import CONNECTION, App, Receive, Scope, Send
from localllm.server.http.peer_user import is_own_user
from localllm.server.http.settings import ServerSettings

_MIN_PROBE_S = 1.0
_BEGINNING = b"HTTP/1.1 "
_ABSOLUTE = re.compile(r"https?://([^/?#]*)", re.IGNORECASE)
_SLASHES = re.compile("/{2,}")
# A new connection has this long to send a request before it can be closed for another one. Many
# clients connect at once.
_FRESH_S = 1.0
# Known connections get one share of the file descriptors. Strangers from this machine and
# strangers from other machines get one share each. The rest is for other files and for connections
# that are closing.
_SHARES = 6
# A named key may have this part of the known connections.
_KEY_PART = 4
_WANTED_DESCRIPTORS = 4096
# A chunk takes 6 µs of the event loop, whatever its size. A body may have so many chunks, and one
# more for each `_CHUNK_BYTES`.
_MAX_CHUNKS = 4096
_CHUNK_BYTES = 64


class Connections:
    """The open connections of one server. Strangers are ordered by their start, known connections
    by their last answer. `descriptors`: the free file descriptors for connections and all other
    files."""

    def __init__(self, settings: ServerSettings, descriptors: int) -> None:
        self.settings = settings
        self._max_connections = min(settings.max_connections, descriptors // _SHARES)
        self._max_of_key = max(1, self._max_connections // _KEY_PART)
        self._max_unknown = min(settings.max_unknown_connections, self._max_connections)
        self._open: dict[Connection, None] = {}

    def add(self, new: Connection) -> None:
        """Add `new` as a stranger. Close another stranger if there are too many."""
        self._open.pop(new, None)  # after its handshake
        strangers = [c for c in self._open if not c.known and c.local == new.local]
        if len(strangers) >= self._max_unknown:
            aged_s = new.loop.time() - _FRESH_S
            full = len(strangers) >= self._max_connections
            oldest = next((c for c in strangers if full or c.resting or c.since_s < aged_s), None)
            if oldest is not None:
                oldest.end()
        self._open[new] = None

    def admit(self, connection: Connection, account: Account) -> None:
        """Make a connection known as that of `account` after its request passed the gate.

        Raises RateLimitError if all connections of a named key are busy, and BusyError if all known
        connections are."""
        if connection.account is account:
            return
        if account.name:
            own = [c for c in self._open if c.account is account]
            if len(own) >= self._max_of_key and not _one_ended(own):
                raise RateLimitError(
                    f"{account.name} has {len(own)} connections, and that is its limit"
                )
        if not connection.known:
            known = [c for c in self._open if c.known]
            if len(known) >= self._max_connections and not _one_ended(known):
                raise BusyError("this server has reached its limit of connections")
        connection.account = account

    def touch(self, connection: Connection) -> None:
        """Record an answer. The known connection that has been idle the longest is closed first."""
        if connection.known and connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def remove(self, connection: Connection) -> None:
        self._open.pop(connection, None)


def _one_ended(connections: Iterable[Connection]) -> bool:
    """End the first idle connection. Return False if all are busy."""
    idle = next((c for c in connections if c.resting), None)
    if idle is not None:
        idle.end()
    return idle is not None


class Connection(H11Protocol):
    """uvicorn's HTTP protocol with TCP_NODELAY and one deadline: for the headers of a request, or
    for the next request.

    `send` is the request's original ASGI `send`. It bypasses our middleware, because each layer
    costs a coroutine. `probes` are functions that send data without meaning. A streamed response
    adds one."""

    all: Connections
    send: Send
    probes: list[Callable[[], None]]
    local = True
    account: Account | None = None
    since_s = 0.0
    _deadline: asyncio.TimerHandle | None = None
    _in_headers = False
    _half = False
    _begun = 0
    _n_chunks = 0
    _n_body_bytes = 0
    _in_pieces = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app = partial(self._answer, self.app)
        self.conn.next_event = self._counted_event  # type: ignore[method-assign]
        self.began(transport)

    def began(self, transport: Any) -> None:
        """Count the connection as a stranger. It must send its headers, or end its handshake, in
        time."""
        peer = transport.get_extra_info("peername")
        self.local = not peer or isinstance(peer, str) or is_loopback(peer[0])
        self.since_s = self.loop.time()
        self.all.add(self)
        self._close_in(self.all.settings.header_timeout_s)
        self._in_headers = True

    async def _answer(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        plain_target(scope)
        scope[CONNECTION] = self
        self.send = send
        self.probes = []
        self._in_pieces = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        # The server is stopping, and the client has been informed (streaming.py, gate.py).
        # uvicorn would log the whole stack.
        with contextlib.suppress(asyncio.CancelledError):
            await app(scope, receive, send)

    @property
    def known(self) -> bool:
        """Whether one of its requests has passed the gate."""
        return self.account is not None

    @cached_property
    def of_own_user(self) -> bool:
        """Whether the client runs as this process's user."""
        sock = self.transport.get_extra_info("socket")
        try:
            return sock is not None and is_own_user(sock)
        except OSError:  # the connection is closed, or the system reports no users
            return False

    @property
    def resting(self) -> bool:
        """Whether the last request is answered and no other is running."""
        return self.cycle is not None and self.cycle.response_complete

    def write_piece(self, data: bytes) -> bool:
        """Send `data` as one chunk of a response that has begun and has no length, as h11 would
        (RFC 9112 7.1). Return False if it can't be sent now, or not in chunks."""
        if not self._in_pieces or self.flow.write_paused or self.transport.is_closing():
            return False
        if data:  # an empty chunk would end the response
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def end(self) -> None:
        """Close the connection now. It is no longer counted."""
        self.all.remove(self)
        if not self.transport.is_closing():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        asked = self.cycle
        if self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            data = data.lstrip(
                b"\r\n"
            )  # some clients send a line break after a body (RFC 9112 2.2)
            if not data:
                return
        super().data_received(data)
        # True if headers are incomplete: h11 holds their bytes and has parsed no request.
        started = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if self.cycle is not asked and not self.resting:
            self._stop_deadline()
        elif started and not self._in_headers:
            self._close_in(self.all.settings.header_timeout_s)
            self._in_headers = True
        # Otherwise the deadline stays. Remaining data of a refused body does not extend it.

    def _counted_event(self) -> Any:
        """h11's `next_event`. Raises RemoteProtocolError for a body in too many chunks."""
        event = h11.Connection.next_event(self.conn)
        if isinstance(event, h11.Request):
            self._n_chunks = self._n_body_bytes = 0
        if isinstance(event, h11.Data):
            self._n_chunks += event.chunk_start
            self._n_body_bytes += len(event.data)
            if self._n_chunks > _MAX_CHUNKS + self._n_body_bytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many small chunks")
        return event

    def send_400_response(self, msg: str) -> None:
        """Answer a request that breaks the protocol, unless it has an answer already, and close."""
        if self._n_chunks > _MAX_CHUNKS:
            msg = f"The body has more than {_MAX_CHUNKS} chunks, most below {_CHUNK_BYTES} bytes."
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data. Return True to keep the connection.

        The client has gone, or it closed its half after a complete request and waits for the
        response (RFC 9112 9.6). Only sending data distinguishes the two: the system of a client
        that has gone rejects the data."""
        sock = self.transport.get_extra_info("socket")
        if self.cycle is None or self.cycle.response_complete:
            return False  # no request is running
        if self.conn.their_state is h11.SEND_BODY:
            return False  # its request is incomplete
        if sock is None or self.scheme == "https" or self.conn.their_http_version != b"1.1":
            return False  # a single character sent early can't be a probe here
        self._half = True
        self.conn.send = self._without_beginning  # type: ignore[method-assign, assignment]
        self._probe(sock, 0.02)
        return True

    def _probe(self, sock: socket.socket, seconds: float) -> None:
        """Send data and check whether the client rejected it. Repeat soon at first, then at longer
        intervals.

        Before the response, the data is the next character of the text with which every response
        begins."""
        if self.transport.is_closing():
            return
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            self.transport.write(_BEGINNING[self._begun : self._begun + 1])
            self._begun = min(self._begun + 1, len(_BEGINNING))
        for probe in self.probes:
            probe()
        self.loop.call_later(seconds, self._probe, sock, max(_MIN_PROBE_S, 2 * seconds))

    def _without_beginning(self, event: Any) -> bytes | None:
        """h11's `send`, without the characters of the response that `_probe` has already sent."""
        data: bytes | None = h11.Connection.send(self.conn, event)
        if isinstance(event, h11.Response) and data is not None:
            begun = self._begun
            self._begun = 0
            return data[begun:]
        return data

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        self.all.touch(self)
        if self._half and self.cycle is answered:  # no further request can follow
            self.transport.close()
        if self.cycle is answered and not self.transport.is_closing():
            self._in_headers = False
            if self.known:
                self._close_in(self.all.settings.idle_timeout_s)
            else:
                self._close_in(self.all.settings.idle_unknown_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost()
        super().connection_lost(exc)
        # After a reset, uvicorn's timer would hold the connection and its request for a minute.
        self._unset_keepalive_if_required()

    def lost(self) -> None:
        """Count the connection no longer."""
        self._stop_deadline()
        self.all.remove(self)

    def _close_in(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self.end)

    def _stop_deadline(self) -> None:
        self._in_headers = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def plain_target(scope: Scope) -> None:
    """Reduce the target in `scope` to the path that routes use.

    An absolute target, as sent to a proxy (RFC 9112 3.2.2), also names the host; it replaces the
    Host header. Repeated slashes become one."""
    absolute = _ABSOLUTE.match(scope["path"])
    if absolute is not None:
        others = [(name, value) for name, value in scope["headers"] if name != b"host"]
        scope["headers"] = [(b"host", absolute[1].encode("latin-1", "replace")), *others]
        scope["path"] = scope["path"][absolute.end() :] or "/"
    if absolute is not None or "//" in scope["path"]:
        scope["path"] = _SLASHES.sub("/", scope["path"])
        scope["raw_path"] = quote(scope["path"]).encode()


def free_descriptors() -> int:
    """Return the number of additional files that this process may open. First raises the limit to
    the number that the server needs, if the system allows it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit for sockets
        return _WANTED_DESCRIPTORS
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _WANTED_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(_SHARES, limit - len(os.listdir("/dev/fd")))
