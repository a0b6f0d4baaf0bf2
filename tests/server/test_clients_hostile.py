"""Slow clients with hostile intent: limits on what a connection may hold open, and how long."""

from __future__ import annotations

import socket

import httpx
import pytest

from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

# Seconds. With a shorter limit a busy machine may not send all headers in time.
HEADER_S = 1.0


def _read_health(s: socket.socket) -> None:
    said = b""
    while not said.endswith(b"}"):
        piece = s.recv(1000)
        assert piece, "the server closed the connection"
        said += piece
    assert b" 200 " in said


def test_slow_headers_after_a_first_request_are_cut_off_too() -> None:
    with (
        running_server({"tiny": ScriptedEngine()}, header_timeout_s=HEADER_S) as server,
        socket.create_connection(("127.0.0.1", server.port)) as s,
    ):
        s.settimeout(30)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _read_health(s)
        s.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        assert s.recv(1000) == b""


def test_a_connection_may_be_idle_between_requests() -> None:
    with (
        running_server({"tiny": ScriptedEngine()}, header_timeout_s=HEADER_S) as server,
        socket.create_connection(("127.0.0.1", server.port)) as s,
    ):
        for _ in range(2):
            s.settimeout(30)
            s.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            _read_health(s)
            s.settimeout(1.5 * HEADER_S)
            with pytest.raises(TimeoutError):
                s.recv(1)  # no data, and the connection is open


def test_many_idle_connections_do_not_block_other_clients() -> None:
    held: list[socket.socket] = []
    with running_server({"tiny": ScriptedEngine()}) as server:
        try:
            for _ in range(200):
                s = socket.create_connection(("127.0.0.1", server.port))
                s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-A: b")
                held.append(s)
            assert httpx.get(server.url + "/health", trust_env=False, timeout=60).status_code == 200
        finally:
            for s in held:
                s.close()
