"""Other accounts of the machine have no access.

They all can connect to loopback. A server without a key answers only its own user, and the
chat's engine has its own key.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from localllm.cli.serve.listening import access_text, key_notice, server_settings
from localllm.server.http import peer_user, settings
from localllm.server.http.settings import ServerSettings
from localllm.settings import Settings
from support.http_server import running_server
from support.own_server import background_server
from support.scripted_engine import ScriptedEngine

NOBODY = 65534
# The probe imports its modules, changes to another user, and prints each request's status or error.
PROBE = """
import encodings.idna, http.client, json, os, sys
port, leave, asked = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
http.client.HTTPConnection("127.0.0.1", 1).close()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for method, path in asked:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = b'{"model": "tiny"}' if method == "POST" else None
    client.request(method, path, body, {"content-type": "application/json"})
    print(method, path, "left" if leave else client.getresponse().status)
    client.close()
"""
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user"
)
needs_report = pytest.mark.skipif(sys.platform != "linux", reason="users are not reported")
OPEN = ("/health", "/v1/health")


def as_nobody(port: int, asked: Iterable[tuple[str, str]], *, leave: bool = False) -> list[str]:
    """Return the lines that the probe printed, one for each of `asked`."""
    command = [sys.executable, "-c", PROBE, str(port), "leave" if leave else ""]
    done = subprocess.run(
        [*command, json.dumps(list(asked))], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def routes_of(app: Any) -> list[tuple[str, str]]:
    """Return every method and path that the server answers, including aliases."""
    routes = list(app.routes)
    for dialects in app.state.dialects:
        routes += chain(*dialects.paths())
    return [(method, route.path) for route in routes for method in sorted(route.methods)]


@needs_root
@needs_report
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_another_user_is_answered_only_on_health_routes(host: str) -> None:
    with running_server({"tiny": ScriptedEngine()}, host=host) as server:
        asked = routes_of(server.app)
        assert len(asked) >= 40
        for line, (_, path) in zip(as_nobody(server.port, asked), asked, strict=True):
            assert line.endswith("200" if path in OPEN else "403"), line


@needs_root
@needs_report
def test_a_client_that_leaves_before_its_user_is_known_has_no_effect() -> None:
    """A client that leaves before its user is looked up has no effect.

    The system reports root as the owner of a closed socket.
    """
    engine = ScriptedEngine()
    with running_server({"tiny": engine}, preload=True) as server:
        as_nobody(server.port, [("POST", "/models/unload")] * 20, leave=True)
        # The earlier connections were accepted before this one.
        [health] = as_nobody(server.port, [("GET", "/health")])
        assert health.endswith("200")
        assert server.app.state.server.requests == 0
        assert not engine.closed


@needs_root
@needs_report
def test_every_user_is_answered_if_the_owner_allows_it() -> None:
    with running_server({"tiny": ScriptedEngine()}, allow_users=True) as server:
        assert as_nobody(server.port, [("GET", "/v1/models")]) == ["GET /v1/models 200"]


@needs_root
def test_the_chats_engine_answers_another_user_only_on_health_routes(tiny_model: Path) -> None:
    with running_server({"tiny": ScriptedEngine()}) as server:
        asked = routes_of(server.app)
    with background_server(str(tiny_model), 256) as engine:
        port = int(engine.base_url.rpartition(":")[2].removesuffix("/v1"))
        for line, (_, path) in zip(as_nobody(port, asked), asked, strict=True):
            assert line.endswith("200" if path in OPEN else "401"), line


@needs_report
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_owner_of_a_connection_is_found(family: socket.AddressFamily) -> None:
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    with socket.socket(family) as listener:
        try:
            listener.bind((loopback, 0))
        except OSError:
            pytest.skip("no IPv6 loopback here")
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        with closing(accepted):
            with closing(client):
                assert peer_user.is_own_user(accepted)
            with suppress(OSError):  # or the system no longer reports the socket
                assert not peer_user.is_own_user(accepted)


def test_a_system_that_reports_no_users_gets_a_kept_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "reports_users", lambda: False)
    made = server_settings(Settings())
    assert made.generated_key
    assert made.api_key == server_settings(Settings()).api_key
    assert "does not report" in key_notice(made)
    assert server_settings(Settings({"allow_users": True})).api_key is None
    assert ServerSettings(unix_socket="x").secured().api_key is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"api_key": "mine"}, "needs a key"),
        ({"unix_socket": "/run/x"}, "only your user"),
        ({"allow_users": True}, "every user"),
        pytest.param({}, "only your user is answered", marks=needs_report),
    ],
)
def test_the_start_line_names_the_users_that_are_answered(given: dict[str, str], said: str) -> None:
    assert said in access_text(server_settings(Settings(given)))
