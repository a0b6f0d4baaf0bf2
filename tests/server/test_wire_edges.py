"""Request targets, empty lines, error envelopes and field names.

They follow the specifications and other servers.
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest

from localllm.server.http.accounts import NamedKey
from support.http_server import Running, running_server
from support.scripted_engine import Gate, ScriptedEngine
from support.until import until

HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
EVERY = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/show",
    "/v1/chat/completions",
    "/v1/models",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"m": ScriptedEngine()}) as running:
        yield running


def _answer(server: Running, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        s.sendall(data)
        out = b""
        while part := s.recv(65536):
            out += part
    return out


def _request(server: Running, target: str, host: str | None = None) -> bytes:
    body = json.dumps(HI).encode()
    head = (
        f"POST {target} HTTP/1.1\r\nHost: {host or f'localhost:{server.port}'}\r\nConnection: "
        "close\r\n"
    )
    return (
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


@pytest.mark.parametrize(
    "target",
    ["http://localhost:1/v1/chat/completions", "HTTPS://127.0.0.1/v1/chat/completions?a=1", "//v1/chat/completions",
     "/v1//chat///completions", "http://localhost//v1/chat/completions/"],
)  # fmt: skip
def test_every_form_of_request_target_selects_its_path(server: Running, target: str) -> None:
    assert b" 200 " in _answer(server, _request(server, target))[:20]


def test_the_host_of_an_absolute_target_counts(server: Running) -> None:
    assert (
        b" 403 "
        in _answer(server, _request(server, "http://evil.example/v1/chat/completions"))[:20]
    )
    assert (
        b" 200 "
        in _answer(
            server, _request(server, "http://localhost/v1/chat/completions", "evil.example")
        )[:20]
    )


@pytest.mark.parametrize("lines", [b"\r\n", b"\r\n\r\n", b"\n"])
def test_empty_lines_before_a_request_are_ignored(server: Running, lines: bytes) -> None:
    assert b" 200 " in _answer(server, lines + _request(server, "/v1/chat/completions"))[:20]


def _is_of_its_dialect(path: str, answer: httpx.Response) -> bool:
    body = answer.json()
    if path.startswith("/v1/messages"):
        names = {
            401: "authentication_error",
            403: "permission_error",
            413: "request_too_large",
            429: "rate_limit_error",
        }
        named = names.get(answer.status_code, "invalid_request_error")
        return bool(
            body["type"] == "error" and body["error"]["type"] == named and body["error"]["message"]
        )
    if path in ("/api/chat", "/api/show"):
        return isinstance(body["error"], str)
    return isinstance(body["error"]["message"], str)


@pytest.mark.parametrize("path", EVERY)
def test_a_refusal_before_routing_has_the_error_format_of_its_path(path: str) -> None:
    key = NamedKey("k", sha256(b"secret").digest(), requests_per_minute=1)
    settings: dict[str, Any] = {
        "api_key": "s",
        "keys": (key,),
        "max_body_bytes": 100,
        "allowed_origins": ("https://page.example",),
    }
    with running_server({"m": ScriptedEngine()}, **settings) as server:
        auth = {"authorization": "Bearer s", "origin": "https://page.example"}
        other = {"authorization": "Bearer secret", "origin": "https://page.example"}
        with httpx.Client(base_url=server.url) as http:
            answers = {
                401: http.post(path, json=HI, headers={"origin": "https://page.example"}),
                403: http.post(path, json=HI, headers={**auth, "host": "evil.example"}),
                405: http.request("PATCH", path, json={}, headers=auth),
                413: http.post(path, json={"a": "x" * 200}, headers=auth),
                415: http.post(path, content=b"{}", headers={**auth, "content-type": "text/plain"}),
            }
            http.post(path, json=HI, headers=other)
            answers[429] = http.post(path, json=HI, headers=other)
    for status, answer in answers.items():
        assert answer.status_code == status, answer.text
        assert _is_of_its_dialect(path, answer), answer.text
        assert answer.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": {"a": 1}}, "prompt.prompt_string"), ({"prompt": [1, {"a": 2}]}, "prompt.1.prompt_string"), ({"prompt": []}, "prompt"),
        ({"stop": 5}, "stop"), ({"stop": ["a", 5]}, "stop.1"), ({"logit_bias": [[1, "x"]]}, "logit_bias.0.1"),
        ({"logit_bias": {"1": []}}, "logit_bias.1"), ({"logit_bias": [[1, True]]}, "logit_bias.0.1"),
        ({"n_predict": "x"}, "n_predict"), ({"temperature": "hot"}, "temperature"),
    ],
)  # fmt: skip
def test_an_error_names_the_field_that_was_sent(
    server: Running, body: dict[str, object], field: str
) -> None:
    answer = httpx.post(server.url + "/completion", json={"prompt": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not any(
        word in answer.text for word in ("list[", "constrained", "str]", "pydantic", "Fields")
    )


BEHIND = [
    ("/v1/chat/completions", {}, b'"finish_reason":"stop"'),
    ("/v1/chat/completions", {"stream": True}, b"data: [DONE]"),
    ("/api/chat", {"stream": True}, b'"done":true'),
]


def _asked(port: int, path: str, more: dict[str, Any]) -> socket.socket:
    """Return a connection on which a complete request was sent and the sending side closed."""
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    ).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    sock.shutdown(socket.SHUT_WR)
    return sock


@pytest.mark.parametrize(("path", "more", "end"), BEHIND)
@pytest.mark.parametrize("slow", [False, True])
def test_a_client_that_closes_its_sending_half_gets_its_answer(
    path: str, more: dict[str, Any], end: bytes, slow: bool
) -> None:
    gate = Gate()
    engine = ScriptedEngine(("Hel", gate, "lo") if slow else ("Hello",))
    with running_server({"m": engine}) as server, _asked(server.port, path, more) as sock:
        if slow:
            until(gate.reached.is_set)
            until(lambda: bool(sock.recv(65536, socket.MSG_PEEK)))
            gate.open()
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert end in answer.replace(b": ", b":") or end in answer
    assert engine.cancelled == []


@pytest.mark.parametrize(("path", "more", "end"), BEHIND)
def test_a_client_that_closes_fully_after_half_closing_cancels_its_request(
    path: str, more: dict[str, Any], end: bytes
) -> None:
    gate = Gate()
    engine = ScriptedEngine(("Hel", gate, "lo"))
    with running_server({"m": engine}) as server:
        sock = _asked(server.port, path, more)
        until(gate.reached.is_set)
        sock.close()
        until(lambda: len(engine.cancelled) == 1)


@pytest.mark.parametrize(("version", "size"), [("1.0", 9), ("1.1", 120_000)])
def test_a_client_that_reads_late_gets_the_complete_stream(version: str, size: int) -> None:
    """A client that reads late gets the whole stream in order.

    Data that the system's buffers cannot take waits, and later data does not overtake it.
    """
    gates = [Gate() for _ in range(4)]
    # The scripted engine takes a step for each byte, and JSON writes this character with six.
    pieces = [f"{i}" + "\x01" * (size if i % 2 else 3) for i in range(16)]
    script = [
        *pieces[:4],
        gates[0],
        *pieces[4:8],
        gates[1],
        *pieces[8:12],
        gates[2],
        *pieces[12:],
        gates[3],
        "end",
    ]
    with running_server({"m": ScriptedEngine(script, n_ctx=10**8)}) as server:
        body = json.dumps({**HI, "max_tokens": 10**7, "stream": True}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/{version}\r\nHost: localhost\r\nContent-Type: "
            "application/json\r\n"
        )
        with socket.socket() as sock:
            sock.settimeout(20)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for gate in gates:
                until(gate.reached.is_set)
                gate.open()
            with http.client.HTTPResponse(sock, method="POST") as response:
                response.begin()
                assert (response.getheader("transfer-encoding") == "chunked") is (version == "1.1")
                lines = iter(response.readline, b"data: [DONE]\n")
                said = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert "".join(s["choices"][0]["delta"].get("content") or "" for s in said) == "".join(
        [*pieces, "end"]
    )
