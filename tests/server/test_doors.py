"""Access control and its error messages.

The tests cover the host names and origins that the user allows, addresses with a key, and
refusals that browsers must be able to read. No combination of settings permits DNS rebinding.
"""

from __future__ import annotations

import itertools

import httpx
import pytest

from localllm.errors import UsageError
from localllm.server.http.settings import ServerSettings
from support.http_server import running_server
from support.scripted_engine import ScriptedEngine

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
KEY = {"Authorization": "Bearer s3cret"}
# Hosts that a page can make a browser send if its own name resolves here: any but addresses.
FOREIGN_NAMES = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
    "10.0.0.8.nip.io", "a.internal",
                 "0x7f.1", "2130706433", "xlocalhost", "localhost.", "[::1].evil.example",
                 "host.docker.internal.evil.example",
                 ".localhost", "192.168.1.5@evil.example",
                 "192.168.1.5:80:evil.example")  # fmt: skip
ADDRESSES = ("192.168.1.5:11535", "10.0.0.8", "[fd00::5]:11535", "8.8.8.8", "0.0.0.0:11535")
CONTAINER_NAMES = (
    "host.docker.internal:11535",
    "host.containers.internal",
    "app.localhost:11535",
    "tauri.localhost",
)


@pytest.fixture(scope="module")
def keyed():
    with (
        running_server({"tiny": ScriptedEngine()}, api_key="s3cret", host="0.0.0.0") as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def plain():
    with (
        running_server({"tiny": ScriptedEngine()}) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def allowing():
    with (
        running_server(
            {"tiny": ScriptedEngine()},
            allowed_hosts=("nas.lan",),
            allowed_origins=("https://chat.example",),
        ) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        yield client


# --- hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [*ADDRESSES, *CONTAINER_NAMES])
def test_an_address_or_a_container_s_name_is_served_with_the_key_and_only_with_it(
    keyed: httpx.Client, plain: httpx.Client, host: str
) -> None:
    assert keyed.get("/v1/models", headers={"Host": host, **KEY}).status_code == 200
    assert keyed.post(CHAT, json=HI, headers={"Host": host, **KEY}).status_code == 200
    assert keyed.get("/v1/models", headers={"Host": host}).status_code == 401
    assert (
        keyed.get("/v1/models", headers={"Host": host, "Authorization": "Bearer wrong"}).status_code
        == 401
    )
    assert plain.get("/v1/models", headers={"Host": host}).status_code == 403
    assert plain.get("/v1/models", headers={"Host": host, **KEY}).status_code == 403


def test_a_name_the_user_allowed_is_served_and_no_other(allowing: httpx.Client) -> None:
    for host in ("nas.lan", "NAS.lan:11535"):
        assert allowing.get("/v1/models", headers={"Host": host}).status_code == 200
    for host in ("other.lan", "x.nas.lan", "nas.lan.evil.example", "chat.example"):
        assert allowing.get("/v1/models", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", FOREIGN_NAMES)
def test_a_host_name_that_a_web_page_can_rebind_is_refused_even_with_a_key(
    keyed: httpx.Client, plain: httpx.Client, allowing: httpx.Client, host: str
) -> None:
    """DNS rebinding is refused for every combination of origin and key.

    The origin is the page's own, an allowed one or missing. The page cannot know the key, but a
    request with the key is refused too.
    """
    own_page = f"http://{host}"
    pages: list[dict[str, str]] = [{}, {"Origin": own_page}, {"Origin": "http://localhost:3000"},
                                   {"Sec-Fetch-Site": "same-origin"}]  # fmt: skip
    for client, page, key in itertools.product((keyed, plain, allowing), pages, ({}, KEY)):
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/health"),
            ("POST", CHAT),
            ("OPTIONS", CHAT),
        ):
            body = {"json": HI} if method == "POST" else {}
            r = client.request(method, path, headers={"Host": host, **page, **key}, **body)
            assert r.status_code == 403, (host, page, method, path)
            if page.get("Origin") == own_page:
                assert "access-control-allow-origin" not in r.headers


# --- origins and what browsers read ---------------------------------------------------------------


def test_only_an_allowed_page_can_read_a_refusal(keyed: httpx.Client) -> None:
    page = {"Origin": "http://localhost:3000"}
    refusals = [
        keyed.get("/v1/models", headers=page),
        keyed.get("/nowhere", headers={**page, **KEY}),
        keyed.put(CHAT, json=HI, headers={**page, **KEY}),
        keyed.post(CHAT, content="{", headers={**page, **KEY, "content-type": "application/json"}),
        keyed.post(CHAT, content="{}", headers={**page, **KEY, "content-type": "text/plain"}),
        keyed.post(CHAT, json={**HI, "model": "other"}, headers={**page, **KEY}),
        keyed.get("/v1/models", headers={**page, "Host": "nas.lan"}),
    ]
    assert [r.status_code for r in refusals] == [401, 404, 405, 400, 415, 404, 403]
    assert {r.headers.get("access-control-allow-origin") for r in refusals} == {
        "http://localhost:3000"
    }
    assert all("origin" in r.headers["vary"].lower() for r in refusals)
    assert "www-authenticate" in refusals[0].headers["access-control-expose-headers"].lower()
    foreign = keyed.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


def test_a_failure_of_the_server_can_be_read_too(caplog: pytest.LogCaptureFixture) -> None:
    def explode(request):
        raise RuntimeError("inside")

    with running_server({"tiny": ScriptedEngine(script=explode)}) as server:
        r = httpx.post(
            server.url + CHAT, json=HI, headers={"Origin": "http://localhost:3000"}, trust_env=False
        )
    assert r.status_code == 500
    assert r.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_a_preflight_echoes_the_headers_a_client_will_send(keyed: httpx.Client) -> None:
    asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count,traceparent"
    r = keyed.options(
        CHAT,
        headers={
            "Origin": "http://localhost:3000",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": asked,
        },
    )
    assert r.status_code == 204
    assert r.headers["access-control-allow-headers"] == asked
    assert {v.strip().lower() for v in r.headers["vary"].split(",")} == {
        "origin",
        "access-control-request-headers",
    }
    foreign = keyed.options(
        CHAT,
        headers={
            "Origin": "https://evil.example",
            "Access-Control-Request-Headers": "authorization",
        },
    )
    assert foreign.status_code == 403
    assert "access-control-allow-headers" not in foreign.headers


def test_a_page_the_user_allowed_is_let_in_and_no_page_like_it(allowing: httpx.Client) -> None:
    for origin in ("https://chat.example", "https://CHAT.example"):
        r = allowing.post(CHAT, json=HI, headers={"Origin": origin, "Sec-Fetch-Site": "cross-site"})
        assert r.status_code == 200
        assert r.headers["access-control-allow-origin"] == origin.lower()
    for origin in (
        "http://chat.example",
        "https://chat.example:8443",
        "https://chat.example.evil",
        "https://x.chat.example",
    ):
        assert allowing.post(CHAT, json=HI, headers={"Origin": origin}).status_code == 403, origin


@pytest.mark.parametrize(
    "origin",
    [
        "app://obsidian.md", "tauri://localhost", "http://tauri.localhost",
        "https://tauri.localhost", "wails://wails", "http://wails.localhost", "views://main",
        "capacitor://localhost", "ionic://localhost", "vscode-webview://a", "vscode-file://a",
    ],
)  # fmt: skip
def test_a_desktop_program_s_own_pages_are_let_in(plain: httpx.Client, origin: str) -> None:
    assert plain.post(CHAT, json=HI, headers={"Origin": origin}).status_code == 200
    reply = plain.options(CHAT, headers={"Origin": origin})
    assert reply.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    "origin",
    [
        "null", "file://", "http://evil.localhost", "http://tauri.localhost:8080",
        "http://tauri.localhost.evil.example", "https://tauri.evil.example",
    ],
)  # fmt: skip
def test_origins_similar_to_those_of_desktop_programs_are_refused(
    plain: httpx.Client, origin: str
) -> None:
    assert plain.post(CHAT, json=HI, headers={"Origin": origin}).status_code == 403


def test_other_names_below_localhost_need_a_key(keyed: httpx.Client, plain: httpx.Client) -> None:
    page = {"Origin": "http://notes.localhost"}
    assert keyed.post(CHAT, json=HI, headers={**page, **KEY}).status_code == 200
    assert keyed.options(CHAT, headers=page).status_code == 204
    assert keyed.options("/completion", headers=page).status_code == 200  # like llama.cpp
    assert keyed.post(CHAT, json=HI, headers=page).status_code == 401
    assert plain.post(CHAT, json=HI, headers=page).status_code == 403


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/openapi.json", "/"])
def test_a_foreign_page_cannot_send_a_get_without_an_origin(plain: httpx.Client, path: str) -> None:
    """An <img> or <script> of any web site sends a GET without an Origin."""
    assert plain.get(path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
    for site in ("none", "same-origin", "same-site"):
        assert plain.get(path, headers={"Sec-Fetch-Site": site}).status_code == 200
    from_local_page = {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:3000"}
    assert plain.get(path, headers=from_local_page).status_code == 200


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_origins": ("chat.example",)},
        {"allowed_origins": ("https://chat.example/path",)},
        {"allowed_origins": ("https://user@chat.example",)},
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("null",)},
        {"allowed_hosts": ("*",)},
        {"allowed_hosts": ("http://nas.lan",)},
        {"allowed_hosts": ("nas.lan/x",)},
        {"allowed_hosts": ("",)},
    ],
)
def test_an_invalid_allowed_host_or_origin_is_refused_with_the_reason(
    wrong: dict[str, tuple[str, ...]],
) -> None:
    with pytest.raises(UsageError, match="--allow-"):
        ServerSettings(**wrong).secured()


def test_every_page_is_allowed_only_behind_a_key() -> None:
    settings = ServerSettings(allowed_origins=("*", "null"), api_key="mine").secured()
    assert settings.allowed_origins == ("*", "null")
    assert ServerSettings(allowed_hosts=("NAS.lan:8080", "[fd00::5]")).secured().allowed_hosts == (
        "nas.lan",
        "fd00::5",
    )
