"""Connections of clients without a key.

In any number, and whatever they send, they end, and no other client waits for them.
"""

from __future__ import annotations

import gc
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from localllm.cli.serve.listening import server_settings
from localllm.errors import UsageError
from localllm.server.http.accounts import NamedKey, digest_of
from localllm.server.http.connections import Connection
from localllm.server.http.settings import CONNECTION_LIMITS
from localllm.settings import Settings
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

# More than the limits on all connections (512) and on those without a key (64).
MANY = 600
KEY = {"Authorization": "Bearer s3cret"}
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
REFUSED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /v1/models HTTP/1.1\r\nHost: loc"
BODY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100000\r\n\r\n{"
)
WRONG = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n"


def _answered(s: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"}"):
        piece = s.recv(4000)
        if not piece:
            break
        said += piece
    return said


def _ended(s: socket.socket) -> bool:
    """Return whether the server has closed the connection. Discard the data it sent."""
    s.setblocking(False)
    try:
        return not s.recv(65536)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@contextmanager
def held(
    server: Running, sends: bytes, count: int = MANY, *, answers: bool = False
) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            s = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=30)
            )
            s.sendall(sends)
            if answers:
                _answered(s)
            found.append(s)
        yield found


def _is_served(server: Running) -> None:
    assert httpx.get(server.url + "/health", trust_env=False, timeout=30).status_code == 200
    assert (
        httpx.post(server.url + CHAT, json=HI, headers=KEY, trust_env=False, timeout=30).status_code
        == 200
    )


strangers = pytest.mark.parametrize(
    ("sends", "answers"),
    [
        (REFUSED, True),
        (WRONG, True),
        (HEALTH, True),
        (REFUSED, False),
        (HALF, False),
        (BODY, False),
        (b"", False),
    ],
    ids=["401", "wrong key", "health", "unread", "half a header", "a body to come", "silent"],
)


@strangers
def test_any_number_of_connections_without_a_key_delays_no_client(
    sends: bytes, answers: bool
) -> None:
    """Clients with a key are answered long before any of these connections would time out."""
    limits = {"idle_unknown_timeout_s": 300.0, "header_timeout_s": 300.0, "body_timeout_s": 300.0}
    with (
        running_server({"tiny": ScriptedEngine()}, api_key="s3cret", **limits) as server,
        held(server, sends, answers=answers),
    ):
        _is_served(server)


@strangers
def test_any_number_of_connections_without_a_key_is_closed(sends: bytes, answers: bool) -> None:
    limits = {"idle_unknown_timeout_s": 0.3, "header_timeout_s": 1.0}
    with (
        running_server({"tiny": ScriptedEngine()}, api_key="s3cret", **limits) as server,
        held(server, sends, 200, answers=answers) as connections,
    ):
        open_ones = set(connections)

        def all_ended() -> bool:
            open_ones.difference_update([s for s in open_ones if _ended(s)])
            return not open_ones

        until(all_ended, "connections stay open")
        _is_served(server)


def test_a_refused_body_that_goes_on_coming_does_not_hold_its_connection() -> None:
    with (
        running_server(
            {"tiny": ScriptedEngine()}, api_key="s3cret", idle_unknown_timeout_s=0.3
        ) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        s.sendall(BODY)
        assert b" 401 " in _answered(s)

        def trickles() -> bool:
            try:
                s.sendall(b" ")
            except ConnectionError:
                return True
            return _ended(s)

        until(trickles, "it stays open")


@pytest.mark.parametrize("second", [False, True], ids=["the first", "a later one"])
def test_headers_that_go_on_coming_do_not_hold_their_connection(second: bool) -> None:
    with (
        running_server({"tiny": ScriptedEngine()}, header_timeout_s=0.5) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        if second:
            s.sendall(REFUSED)
            assert b" 200 " in _answered(s)
            s.setblocking(True)
        s.sendall(HALF)

        def trickles() -> bool:
            try:
                s.sendall(b"c")
            except ConnectionError:
                return True
            return _ended(s)

        until(trickles, "it stays open")


def test_an_admitted_connection_may_be_idle_longer_than_an_unknown_one() -> None:
    let_in = REFUSED.replace(b"\r\n\r\n", b"\r\nAuthorization: Bearer s3cret\r\n\r\n")
    with (
        running_server(
            {"tiny": ScriptedEngine()}, api_key="s3cret", idle_unknown_timeout_s=0.2
        ) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as known,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as stranger,
    ):
        known.sendall(let_in)
        assert b" 200 " in _answered(known)
        stranger.sendall(REFUSED)
        _answered(stranger)
        assert stranger.recv(1) == b""
        known.sendall(let_in)
        assert b" 200 " in _answered(known)


def test_an_admitted_idle_connection_is_closed_too() -> None:
    with (
        running_server({"tiny": ScriptedEngine()}, idle_timeout_s=0.2) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        s.sendall(REFUSED)
        assert b" 200 " in _answered(s)
        assert s.recv(1) == b""


def test_an_idle_known_connection_is_closed_for_a_new_one_and_busy_ones_are_not() -> None:
    gate = Gate()
    engine = ScriptedEngine(script=lambda request: [gate, "done"])
    with running_server({"tiny": engine}, max_connections=2, max_unknown_connections=2) as server:
        with held(
            server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 2, answers=True
        ) as resting:
            assert (
                httpx.get(server.url + "/v1/models", trust_env=False, timeout=30).status_code == 200
            )
            until(lambda: any(_ended(s) for s in resting), "none made room")
        busy = [
            threading.Thread(
                target=httpx.post, args=(server.url + CHAT,), kwargs={"json": HI, "timeout": 20}
            )
            for _ in range(2)
        ]
        for thread in busy:
            thread.start()
        try:
            until(lambda: server.app.state.server.active == 2)
            page = {"Origin": "http://localhost:3000"}
            refused = httpx.get(
                server.url + "/v1/models", trust_env=False, timeout=30, headers=page
            )
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "server_busy"
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["access-control-allow-origin"] == page["Origin"]
            assert httpx.get(server.url + "/health", trust_env=False, timeout=30).status_code == 200
        finally:
            gate.open()
            for thread in busy:
                thread.join(20)


def test_one_key_may_hold_only_a_part_of_the_connections() -> None:
    """One key that may have one request opens streams of events that never end."""
    secrets = {name: f"secret-of-{name}-0123456789" for name in ("anna", "bob")}
    keys = tuple(NamedKey(n, digest_of(s.encode()), parallel=1) for n, s in secrets.items())
    anna, bob = ({"Authorization": f"Bearer {secret}"} for secret in secrets.values())
    endless = (
        "GET /models/sse HTTP/1.1\r\nHost: localhost\r\n"
        f"Authorization: {bob['Authorization']}\r\n\r\n"
    )
    with (
        running_server({"tiny": ScriptedEngine()}, keys=keys, max_connections=40) as server,
        ExitStack() as held_open,
    ):
        said = []
        for _ in range(60):
            s = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            held_open.enter_context(s).sendall(endless.encode())
            said.append(s.recv(12))
        assert said == [b"HTTP/1.1 200"] * 10 + [b"HTTP/1.1 429"] * 50
        for who, status in ((anna, 200), (bob, 429)):
            reply = httpx.get(server.url + "/v1/models", headers=who, trust_env=False)
            assert reply.status_code == status


def test_a_body_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    two = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 4\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )
    with (
        running_server({"tiny": ScriptedEngine()}) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        s.sendall(two + HEALTH)
        said = b""
        while piece := s.recv(4000):
            said += piece
        assert said.startswith(b"HTTP/1.1 400 ")
        assert said.count(b"HTTP/1.1") == 1
        assert b"both Content-Length and Transfer-Encoding" in said


CHUNKED = BODY.replace(b"Content-Length: 100000\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n")


def _until_closed(s: socket.socket) -> bytes:
    said = b""
    with suppress(ConnectionError):
        while piece := s.recv(4000):
            said += piece
    return said


@pytest.mark.parametrize("answered", [False, True])
def test_a_body_in_many_small_chunks_is_refused_and_its_connection_closed(answered: bool) -> None:
    """Each chunk takes time of the event loop, also after the request was refused."""
    with (
        running_server({"tiny": ScriptedEngine()}, api_key="s3cret") as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        key = b"" if answered else b"Authorization: Bearer s3cret\r\n"
        s.sendall(CHUNKED.replace(b"Host:", key + b"Host:"))
        if answered:
            assert b" 401 " in _answered(s)
        with suppress(ConnectionError):
            s.sendall(b"1\r\n \r\n" * 5000)
        said = _until_closed(s)
        assert (b"more than 4096 chunks" in said) is not answered


def test_a_body_in_a_few_thousand_small_chunks_is_read() -> None:
    with (
        running_server({"tiny": ScriptedEngine()}) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        s.sendall(CHUNKED + b"1\r\n \r\n" * 4000 + b"2\r\n{}\r\n0\r\n\r\n")
        assert b"messages" in _answered(s)


@pytest.mark.parametrize("answered", [False, True])
def test_a_broken_chunk_closes_the_connection_without_a_traceback(
    answered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_server({"tiny": ScriptedEngine()}, api_key="s3cret") as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as s,
    ):
        s.sendall(CHUNKED)
        if answered:
            assert b" 401 " in _answered(s)
        s.sendall(b"x\r\n")
        assert _until_closed(s).count(b"HTTP/1.1") <= 1
        _is_served(server)
    assert "Traceback" not in caplog.text
    assert "Fatal" not in caplog.text


def test_a_body_at_the_least_rate_is_waited_for_and_a_slower_one_is_not() -> None:
    limits = {"body_timeout_s": 1.5, "min_body_bytes_s": 2_000}
    head = BODY.replace(b"100000", b"25000")[:-1]
    with running_server({"tiny": ScriptedEngine()}, **limits) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
            pause = threading.Event()
            s.sendall(head)
            for _ in range(25):
                s.sendall(b" " * 1000)
                pause.wait(0.08)
            assert b" 400 " in _answered(s), "25 kB in two seconds are more than 2 kB/s"
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
            s.sendall(head + b" " * 100)
            assert b" 408 " in _answered(s)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows bounds no sockets")
def test_a_connection_that_its_client_resets_after_the_answer_is_released() -> None:
    def held_connections() -> int:
        gc.collect()
        return sum(isinstance(each, Connection) for each in gc.get_objects())

    with running_server({"tiny": ScriptedEngine()}) as server:
        until(lambda: held_connections() == 0)
        s = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        s.sendall(HEALTH)
        _answered(s)
        assert held_connections() == 1
        # with this option, `close` resets the connection
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()
        until(lambda: held_connections() == 0)


def test_a_low_limit_of_open_files_limits_the_connections() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server.few_descriptors"],
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process, ExitStack() as idle:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(70):
            idle.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        with socket.create_connection(("127.0.0.1", port), timeout=30) as late:
            late.sendall(HEALTH)
            assert b" 200 " in _answered(late)
        assert process.communicate()[1] == b""


def test_the_connection_limits_are_settings_and_cannot_be_zero() -> None:
    assert server_settings(Settings({"max_unknown_connections": 3})).max_unknown_connections == 3
    for name in CONNECTION_LIMITS:
        with pytest.raises(UsageError, match=name):
            server_settings(Settings({name: 0}))
