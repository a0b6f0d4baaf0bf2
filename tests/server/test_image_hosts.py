"""Images at addresses are fetched only from hosts that the user named, in every form of request."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.cli.serve.listening import server_settings
from localllm.errors import UsageError
from localllm.server.generation.image_fetching import MAX_BYTES
from localllm.server.http.settings import image_host
from localllm.server.http.sockets import trusted_certificates
from localllm.settings import Settings
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

FILE = b"\xff\xd8\xff\xe0 the bytes of an image, which nobody decodes here"
CHAT, RESP, ANTH = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass
class Web:
    """A host of images on loopback, reachable only over https.

    `asked` lists the paths. Setting `long` releases the requests that wait at /slow.
    """

    port: int
    certificate: Path
    asked: list[str] = field(default_factory=list)
    long: threading.Event = field(default_factory=threading.Event)

    def url(self, path: str, host: str = "localhost") -> str:
        return f"https://{host}:{self.port}{path}"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    folder = tmp_path_factory.mktemp("web")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
        "-nodes", "-days", "2",
               "-subj", "/CN=localhost", "-addext",
               "subjectAltName=DNS:localhost,DNS:images.example,IP:127.0.0.1",
               "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.asked.append(self.path)
            where = {
                "/inside": "/a.jpg",
                "/outside": found.url("/a.jpg", "127.0.0.1"),
                "/round": "/round",
            }.get(self.path)
            if where is not None:
                self.send_response(302)
                self.send_header("location", where)
                self.send_header("content-length", "0")
                self.end_headers()
                return
            if self.path == "/slow":
                found.long.wait()
            self.send_response(404 if self.path == "/gone" else 200)
            self.end_headers()
            try:
                self.wfile.write(bytes(MAX_BYTES + 1) if self.path == "/large" else FILE)
            except OSError:  # the client has left
                pass

        def log_message(self, *_: Any) -> None:
            """Write no log to stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    found = Web(server.server_address[1], certificate)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield found
    found.long.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def trusted(web: Web, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trust the host's certificate, and clear its list of paths."""
    monkeypatch.setenv("SSL_CERT_FILE", str(web.certificate))
    trusted_certificates.cache_clear()
    web.asked.clear()
    yield
    trusted_certificates.cache_clear()


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(vision=True)


@pytest.fixture
def http(web: Web, engine: ScriptedEngine) -> Iterator[httpx.Client]:
    hosts = (("localhost", web.port), ("images.example", web.port))
    with (
        running_server({"tiny": engine}, image_hosts=hosts) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
    ):
        yield client


@pytest.fixture
def closed(engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_server({"tiny": engine}) as running,
        httpx.Client(base_url=running.url, trust_env=False, timeout=60) as client,
    ):
        yield client


def user(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 5}


def chat(url: str) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": url}})


def doors(url: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a request for every form in which an image's address can be sent."""
    item = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    block = {"type": "image", "source": {"type": "url", "url": url}}
    ollama = {"messages": [{"role": "user", "content": "x", "images": [url]}], "stream": False}
    return {
        "chat": (CHAT, chat(url)),
        "a stream": (CHAT, {**chat(url), "stream": True}),
        "responses": (RESP, item),
        "counted items": (RESP + "/input_tokens", item),
        "messages": (ANTH, user(block)),
        "counted messages": (ANTH + "/count_tokens", user(block)),
        "ollama's chat": ("/api/chat", ollama),
        "ollama's generate": ("/api/generate", {"prompt": "x", "images": [url], "stream": False}),
    }


DOORS = list(doors(""))


@pytest.mark.parametrize("door", DOORS)
def test_an_image_of_an_allowed_host_is_fetched(
    door: str, http: httpx.Client, web: Web, engine: ScriptedEngine
) -> None:
    path, body = doors(web.url("/a.jpg"))[door]
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert web.asked == ["/a.jpg"]
    if "count" not in door:
        assert list(engine.requests[-1].media.values()) == [base64.b64encode(FILE).decode()]


@pytest.mark.parametrize("door", DOORS)
def test_any_other_host_is_refused_with_the_reason(
    door: str, http: httpx.Client, closed: httpx.Client, web: Web, engine: ScriptedEngine
) -> None:
    asked = len(engine.requests)
    # The same host under a name, port or scheme that is not allowed, and with user information.
    others = (
        web.url("/a.jpg", "127.0.0.1"), "https://localhost/a.jpg", web.url("/a.jpg", "x@localhost"),
        web.url("/a.jpg", "localhost.example"), f"https://localhost:{web.port}@127.0.0.1/",
        "file:///etc/passwd",
    )  # fmt: skip
    for client, url in ((closed, web.url("/a.jpg")), *((http, url) for url in others)):
        path, body = doors(url)[door]
        reply = client.post(path, json=body)
        assert reply.status_code == 400, url
        assert "does not download images" in reply.text
    assert web.asked == []
    assert len(engine.requests) == asked


def test_addresses_in_llama_cpps_form_are_refused(http: httpx.Client, web: Web) -> None:
    body = {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [web.url("/a.jpg")]}}
    reply = http.post("/completion", json=body)
    assert reply.status_code == 400
    assert "does not download images" in reply.text
    assert web.asked == []


def test_a_later_turn_uses_the_same_image_without_fetching_it_again(
    http: httpx.Client, web: Web, engine: ScriptedEngine
) -> None:
    first = chat(web.url("/b.jpg"))
    assert http.post(CHAT, json=first).status_code == 200
    before = engine.requests[-1]
    later = {
        "messages": [
            *first["messages"],
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "?"},
        ]
    }
    assert http.post(CHAT, json=later).status_code == 200
    assert engine.requests[-1].media == before.media
    assert web.asked == ["/b.jpg"]


def test_an_image_in_a_tool_s_result_is_fetched_and_one_that_can_t_be_is_a_note(
    http: httpx.Client, web: Web, engine: ScriptedEngine
) -> None:
    for path, ignored in (("/c.jpg", None), ("/gone", "messages.images")):
        block = {"type": "image", "source": {"type": "url", "url": web.url(path)}}
        result = {
            "type": "tool_result",
            "tool_use_id": "t",
            "content": [{"type": "text", "text": "here"}, block],
        }
        reply = http.post(ANTH, json=user(result))
        assert reply.status_code == 200, reply.text
        assert reply.headers.get("x-localllm-ignored") == ignored
        assert bool(engine.requests[-1].media) == (ignored is None)
    assert "answered with status 404" in str(engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gone", "answered with status 404"),
        ("/outside", "a host that is not allowed"),
        ("/round", "redirected more than"),
        ("/large", "more than 20000000 bytes"),
    ],
)
def test_an_image_that_cannot_be_fetched_is_refused_with_the_reason(
    http: httpx.Client, web: Web, path: str, said: str
) -> None:
    reply = http.post(CHAT, json=chat(web.url(path)))
    assert reply.status_code == 400
    assert said in reply.json()["error"]["message"]
    assert "/a.jpg" not in web.asked


def test_a_host_may_redirect_to_itself(http: httpx.Client, web: Web) -> None:
    assert http.post(CHAT, json=chat(web.url("/inside"))).status_code == 200
    assert web.asked == ["/inside", "/a.jpg"]


def test_images_are_fetched_only_over_https_with_a_valid_certificate(
    http: httpx.Client, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = http.post(CHAT, json=chat(f"http://localhost:{web.port}/a.jpg"))
    assert "only over https" in reply.json()["error"]["message"]
    monkeypatch.delenv("SSL_CERT_FILE")
    trusted_certificates.cache_clear()
    reply = http.post(CHAT, json=chat(web.url("/d.jpg")))
    assert reply.status_code == 400
    assert "can't be reached" in reply.json()["error"]["message"]
    assert web.asked == []


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("10.0.0.7", "private"),
        ("169.254.169.254", "link-local"),
        ("::ffff:127.0.0.1", "loopback"),
    ],
)
def test_a_host_name_with_an_internal_address_is_refused(
    http: httpx.Client, web: Web, monkeypatch: pytest.MonkeyPatch, address: str, kind: str
) -> None:
    """A name is refused if any of its addresses is internal.

    The connection could go to any of them.
    """
    real = socket.getaddrinfo
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def lookup(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host != "images.example":
            return real(host, port, *args, **more)
        outside = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port))
        return [outside, (family, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    reply = http.post(CHAT, json=chat(web.url("/a.jpg", "images.example")))
    assert reply.status_code == 400
    assert f"has a {kind} address" in reply.json()["error"]["message"]
    assert web.asked == []


def test_a_host_that_does_not_answer_causes_an_error_after_the_time_limit(
    web: Web, engine: ScriptedEngine
) -> None:
    with running_server({"tiny": engine}, image_hosts=(("127.0.0.1", web.port),)) as running:
        running.app.state.server.images.time_limit_s = 0.2
        reply = httpx.post(
            running.url + CHAT,
            json=chat(web.url("/slow", "127.0.0.1")),
            trust_env=False,
            timeout=60,
        )
    assert reply.status_code == 400
    assert "within" in reply.json()["error"]["message"]


def test_the_images_that_one_request_may_fetch_are_limited(
    web: Web, engine: ScriptedEngine
) -> None:
    with running_server({"tiny": engine}, image_hosts=(("127.0.0.1", web.port),)) as running:
        running.app.state.server.images.max_images = 2
        parts = [
            {"type": "image_url", "image_url": {"url": web.url(f"/{i}.jpg", "127.0.0.1")}}
            for i in range(3)
        ]
        reply = httpx.post(running.url + CHAT, json=user(*parts), trust_env=False, timeout=60)
    assert reply.status_code == 400
    assert "2 images" in reply.json()["error"]["message"]
    assert len(web.asked) == 2


def test_no_image_is_fetched_for_a_model_without_image_input(web: Web) -> None:
    with running_server(
        {"tiny": ScriptedEngine()}, image_hosts=(("localhost", web.port),)
    ) as running:
        reply = httpx.post(running.url + CHAT, json=chat(web.url("/a.jpg")), trust_env=False)
    assert reply.status_code == 400
    assert "does not support images" in reply.json()["error"]["message"]
    assert web.asked == []


def test_hosts_are_named_in_full_by_flag_or_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_host("Images.Example") == ("images.example", 443)
    assert image_host("10.0.0.7:8443") == ("10.0.0.7", 8443)
    assert image_host("[::1]:8443") == ("::1", 8443)
    assert image_host("[::1]") == ("::1", 443)
    for wrong in (
        "*",
        "*.example",
        "https://images.example",
        "images.example/x",
        "a b",
        "",
        "a:0",
        "a:x",
        "a:99999",
    ):
        with pytest.raises(UsageError, match="--allow-image-hosts"):
            image_host(wrong)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("LOCALLLM_ALLOW_IMAGE_HOSTS", "a.example, b.example:8443")
    assert server_settings(Settings()).image_hosts == (("a.example", 443), ("b.example", 8443))
    assert server_settings(Settings({"allow_image_hosts": ["c.example"]})).image_hosts == (
        ("c.example", 443),
    )
    assert (
        server_settings(Settings({"allow_image_hosts": ["c.example"], "offline": True})).image_hosts
        == ()
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert server_settings(Settings()).image_hosts == ()
