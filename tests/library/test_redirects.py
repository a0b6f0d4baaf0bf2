"""Redirects of a hub are followed with limits.

Other schemes and addresses in our network are refused, and the token is not sent.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from library.hub import Hub, running
from localllm.addresses import address_kind
from localllm.errors import DownloadError
from localllm.library.hub import Patience, new_client
from localllm.library.pull import pull
from localllm.library.redirects import RedirectRule

REPO = "tiny-org/Tiny-1B-GGUF"
FILES = {"Tiny-1B-Q4_K_M.gguf": bytes(20_000)}

# Addresses to which a hub on loopback may not redirect, with the word in the refusal.
ELSEWHERE = [
    ("http://169.254.169.254", "link-local"),
    ("http://0xa9fea9fe", "link-local"),
    ("http://[::ffff:169.254.169.254]", "link-local"),
    ("http://[fe80::1]", "link-local"),
    ("http://10.0.0.7", "private"),
    ("http://192.168.1.1:8080", "private"),
    ("https://172.16.0.1", "private"),
    ("http://[fd00::1]", "private"),
    ("http://[64:ff9b::a00:1]", "private"),
    ("http://224.0.0.1", "reserved"),
    ("file://", "file: address"),
    ("file://localhost", "file: address"),
    ("ftp://127.0.0.1", "ftp: address"),
]


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the hosts to which sockets of this process connect."""
    hosts: list[str] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: Any) -> None:
        hosts.append(str(address[0]))
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return hosts


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a table of host names and their addresses, in addition to real ones."""
    known: dict[str, str] = {}
    real = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **kwargs: Any) -> Any:
        return real(known.get(host, host), *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.mark.parametrize(("there", "word"), ELSEWHERE)
def test_content_is_never_fetched_from_another_kind_of_network(
    hub: Hub,
    cache: Path,
    patience: Patience,
    waits: list[float],
    connected: list[str],
    there: str,
    word: str,
) -> None:
    hub.add(REPO, FILES)
    hub.cdn = there
    with pytest.raises(DownloadError, match=word) as e:
        pull(REPO, patience=patience)
    assert e.value.hint
    assert set(connected) == {"127.0.0.1"}
    assert not waits, "what is refused is not tried again"
    assert not list(cache.rglob("*.gguf"))


@pytest.mark.parametrize(("there", "word"), ELSEWHERE)
def test_the_list_of_files_is_never_requested_from_another_kind_of_network(
    hub: Hub, patience: Patience, waits: list[float], connected: list[str], there: str, word: str
) -> None:
    hub.api_location = there
    with pytest.raises(DownloadError, match=word):
        pull(REPO, patience=patience)
    assert set(connected) == {"127.0.0.1"}
    assert not waits


def test_a_public_hub_cannot_redirect_to_loopback(
    hub: Hub, patience: Patience, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public hub cannot redirect a client to loopback.

    The hub is reached through a proxy. The redirect's target listens on this machine.
    """
    hub.add(REPO, FILES)
    names["hub.example"], names["inside.example"] = "93.184.216.34", "127.0.0.1"
    with running(Hub()) as inside:
        monkeypatch.setenv("HTTP_PROXY", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost,inside.example")
        port = inside.url.rpartition(":")[2]
        for host in (
            "127.0.0.1",
            "localhost",
            "0.0.0.0",
            "[::1]",
            "2130706433",
            "127.1",
            "inside.example",
        ):
            hub.cdn = f"http://{host}:{port}"
            with new_client({}, patience, "http://hub.example") as client:
                url = f"http://hub.example/{REPO}/resolve/main/Tiny-1B-Q4_K_M.gguf"
                with pytest.raises(DownloadError, match="loopback"):
                    client.get(url)
        assert [s.kind for s in hub.seen] == ["resolve"] * 7
        assert not inside.seen


def test_every_hop_of_a_redirect_chain_is_checked(
    patience: Patience, names: dict[str, str]
) -> None:
    names.update(
        {
            "hub.example": "93.184.216.34",
            "cdn.example": "93.184.216.35",
            "inside.example": "10.1.2.3",
        }
    )
    hops = {"hub.example": "https://cdn.example/a", "cdn.example": "https://inside.example/b"}
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        return httpx.Response(302, headers={"Location": hops[request.url.host]})

    with new_client({}, patience, "https://hub.example") as client:
        hooks = client.event_hooks
    through = httpx.Client(
        transport=httpx.MockTransport(answer), event_hooks=hooks, follow_redirects=True
    )
    with through, pytest.raises(DownloadError, match="private"):
        through.get("https://hub.example/x")
    assert asked == ["hub.example", "cdn.example"]


def test_a_private_hub_may_redirect_to_private_and_public_addresses_only(
    names: dict[str, str],
) -> None:
    names.update(
        {"mirror.example": "10.0.0.5", "store.example": "10.0.0.6", "cdn.example": "93.184.216.35"}
    )
    rule = RedirectRule("https://mirror.example/hub")
    for url in (
        "https://mirror.example:8443/x",
        "https://store.example/x",
        "https://cdn.example/x",
    ):
        rule.check(url)
    for url in ("https://127.0.0.1/x", "https://169.254.169.254/latest/meta-data"):
        with pytest.raises(DownloadError):
            rule.check(url)


def test_a_host_that_only_the_proxy_resolves_is_allowed_if_encrypted(names: dict[str, str]) -> None:
    rule = RedirectRule("https://hub.invalid")
    rule.check("https://cdn.invalid/x")
    with pytest.raises(DownloadError, match="unencrypted"):
        rule.check("http://cdn.invalid/x")


@pytest.mark.parametrize(
    "url", ["https://[::1/x", "https:///x", "https://hub.example:99999/x", "nowhere"]
)
def test_a_redirect_to_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(DownloadError, match="an unusable address"):
        RedirectRule("https://hub.example").check(url)


def test_a_redirect_of_the_file_list_sends_the_token_to_no_other_host(
    hub: Hub, patience: Patience, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.add(REPO, FILES)
    hub.api_location = hub.cdn
    assert pull(REPO, patience=patience).path.read_bytes() == FILES["Tiny-1B-Q4_K_M.gguf"]
    api = [s.authorization for s in hub.seen if s.kind == "api"]
    assert api == ["Bearer hf_secret", ""]
    assert {s.authorization for s in hub.contents()} == {""}


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("8.8.8.8", "public"), ("2606:4700::1", "public"), ("::ffff:8.8.8.8", "public"), ("127.9.9.9", "loopback"),
        ("::1", "loopback"), ("::", "loopback"), ("0.0.0.0", "loopback"), ("::ffff:127.0.0.1", "loopback"),
        ("2002:7f00:1::", "loopback"), ("64:ff9b::7f00:1", "loopback"), ("169.254.1.1", "link-local"),
        ("fe80::1%eth0", "link-local"), ("100.64.0.1", "private"), ("fc00::1", "private"), ("240.0.0.1", "reserved"),
    ],
)  # fmt: skip
def test_each_address_has_its_kind(address: str, kind: str) -> None:
    assert address_kind(address) == kind
