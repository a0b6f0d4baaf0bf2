"""Network traffic of commands and its destinations.

A proxy and a hook on every connection record it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from library.hub import Hub
from library.test_pull import REPO, files
from support.until import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="one system is enough")

# Python imports this module at its start, in every process of a command.
HOOK = """
import json, os, sys

def note(event, found):
    if event in ("socket.getaddrinfo", "socket.connect"):
        address = found[0] if event == "socket.getaddrinfo" else found[1]
        with open(os.environ["RECORD"], "a") as file:
            file.write(json.dumps([event, str(address)]) + "\\n")

sys.addaudithook(note)
"""
LOCAL = ("127.0.0.1", "localhost", "::1", "0.0.0.0", "None")


@dataclass
class Proxy:
    """An HTTP proxy that forwards to the loopback hub and records its requests."""

    url: str = ""
    hub: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def recording_proxy(hub: str) -> Iterator[Proxy]:
    proxy = Proxy(hub=hub)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Write no log."""

        def do_GET(self) -> None:
            self._forward()

        def do_HEAD(self) -> None:
            self._forward()

        def do_POST(self) -> None:
            self._forward()

        def do_CONNECT(self) -> None:
            proxy.asked.append(f"CONNECT {self.path}")
            self.send_error(502)

        def _forward(self) -> None:
            proxy.asked.append(f"{self.command} {self.path}")
            path = urlsplit(self.path)._replace(scheme="", netloc="").geturl()
            with httpx.Client(trust_env=False) as client:
                reply = client.request(self.command, f"{proxy.hub}{path}")
            self.send_response(reply.status_code)
            for name, value in reply.headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "content-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield proxy
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with the hook of connections, and without the offline rule."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    places = [str(tmp_path / "hook"), environment.get("PYTHONPATH", "")]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(filter(None, places)),
        "RECORD": str(tmp_path / "record"),
        "AI_AGENT": "some-agent",
    }


def outside(environment: dict[str, str]) -> list[list[str]]:
    """Return the connections to other machines, and the names that were looked up."""
    record = Path(environment["RECORD"])
    if not record.exists():
        return []
    noted = [json.loads(line) for line in record.read_text().splitlines()]
    return [
        one
        for one in noted
        if not any(host in one[1] for host in LOCAL) and one[1][:1] not in ("/", "b", "")
    ]


def test_pull_asks_the_hub_for_its_listing_and_files_only(
    hub: Hub, environment: dict[str, str]
) -> None:
    repo = hub.add(REPO, files("Q4_K_M"))
    with recording_proxy(hub.url) as proxy:
        # A name that only the proxy can reach.
        environment |= {"HF_ENDPOINT": "http://hub.example", "HTTP_PROXY": proxy.url,
                        "HTTPS_PROXY": proxy.url, "http_proxy": proxy.url}  # fmt: skip
        hub.cdn = "http://cdn.example"
        done = subprocess.run(
            [sys.executable, "-m", "localllm", "pull", REPO],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked = {line.partition("?")[0] for line in proxy.asked}
    listing = {f"GET http://hub.example/api/models/{REPO}"}
    allowed = ("/resolve/", "http://cdn.example/cdn/")
    assert {line for line in asked if not any(part in line for part in allowed)} <= listing
    assert any(repo.digest(name) in line for name in repo.files for line in asked)
    # The names are looked up, because no redirect may lead to a private address.
    looked_up = {(event, name) for event, name in outside(environment)}
    assert looked_up <= {("socket.getaddrinfo", f"{name}.example") for name in ("hub", "cdn")}
    assert not [seen for seen in hub.seen if "agent/" in seen.user_agent]


@pytest.mark.parametrize(
    "words",
    [
        ["chat", "-m", "starter", "--max-tokens", "4", "hi"],
        ["recommend", "--device", "m4-max-64gb"],
    ],
    ids=lambda words: words[0],
)
def test_chat_and_recommend_send_nothing(words: list[str], environment: dict[str, str]) -> None:
    with recording_proxy("") as proxy:
        environment |= {"HTTP_PROXY": proxy.url, "HTTPS_PROXY": proxy.url, "ALL_PROXY": proxy.url}
        done = subprocess.run(
            [sys.executable, "-m", "localllm", *words],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert Path(environment["RECORD"]).exists() is (words[0] == "chat")
    assert (proxy.asked, outside(environment)) == ([], [])


def test_serve_sends_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    socket_path = tmp_path / "s"
    with recording_proxy("") as proxy:
        environment |= {"HTTP_PROXY": proxy.url, "HTTPS_PROXY": proxy.url, "ALL_PROXY": proxy.url}
        server = subprocess.Popen(
            [sys.executable, "-m", "localllm", "serve", "starter", "--unix", str(socket_path)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(socket_path.exists, "the server listens")
        transport = httpx.HTTPTransport(uds=str(socket_path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as http:
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
        server.send_signal(signal.SIGTERM)
        server.wait()
    assert (proxy.asked, outside(environment)) == ([], [])
