"""The security gate that every request passes before its route. It checks Host, Origin, key,
content type and body size. It also turns exceptions of the routes into responses.

Requests through loopback are not trusted, because any web page can make the user's browser send
them. These checks apply:
- Host must be a name of this machine (against DNS rebinding). A name that the owner of a web page
  could point here is refused, with or without a key.
- An Origin must be allowed. A request without one must not be cross-site (Sec-Fetch-Site).
- A body must be declared as JSON. A web page can't send that without a preflight.
- Without keys, only clients of this process's user are answered (peer_user.py).
- Keys are compared in constant time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from functools import lru_cache

from starlette.responses import Response

from localllm.addresses import is_loopback
from localllm.errors import AuthError, RequestError
from localllm.server.http.accounts import CALLER, DELEGATION, NOBODY, Account, Accounts
from localllm.server.http.asgi import CONNECTION, App, Message, Receive, Scope, Send
from localllm.server.http.errors import (
    BodyTooLargeError,
    KeyRequiredError,
    MediaTypeError,
    for_client,
    refusal,
    stopping,
)
from localllm.server.http.json_body import body_memory
from localllm.server.http.kv_servers import HEADER as KV_SERVERS
from localllm.server.http.kv_servers import note_kv_servers
from localllm.server.http.settings import (
    ServerSettings,
    below_localhost,
    host_name,
    served_with_key,
)

# Origins of the built-in pages of desktop programs. No web site can have one of these schemes,
# because only the program itself serves them:
_APP_SCHEMES = (
    "app:",  # Electron's usual one (Obsidian)
    "tauri:",  # Tauri on macOS and Linux
    "wails:",  # Wails on macOS and Linux
    "views:",  # Electrobun
    "capacitor:", "ionic:",  # Capacitor and Ionic on iOS
    "vscode-webview:", "vscode-file:",
)  # fmt: skip
# WebView2 and Android's webview have no custom schemes. Tauri and Wails use names below localhost
# there, without a port. In a browser, DNS cannot give such a name to anyone else (RFC 6761).
_APP_NAMES = ("tauri.localhost", "wails.localhost")
# Need no key: they only show that a server is running.
_OPEN_PATHS = ("/health", "/v1/health")
_BODY_METHODS = ("POST", "PUT", "PATCH")
_FORM_PATHS = ("/v1/audio/", "/audio/")
_FORM = b"application/x-www-form-urlencoded"
_CORS = {
    "access-control-expose-headers": "x-localllm-ignored, x-localllm-cache, x-localllm-compacted, "
    "x-localllm-identical-calls, x-localllm-normalised, x-localllm-priority, x-localllm-ran-on, "
    "x-localllm-seed, x-request-id, request-id, retry-after, www-authenticate",
    "vary": "Origin",
}
_ONE_ONLY = (b"host", b"origin", b"content-type", b"content-length", b"sec-fetch-site")


class SecurityGate:
    """ASGI middleware that refuses requests that the settings do not allow.

    It adds CORS headers for allowed origins, strips trailing slashes, and turns exceptions into
    error objects. The error object of an unexpected exception contains no internals."""

    def __init__(self, app: App, settings: ServerSettings, accounts: Accounts) -> None:
        self.app = app
        self.settings = settings
        self._accounts = accounts
        self._hosts = {h.lower() for h in settings.allowed_hosts} | {settings.host.lower()}
        self._origins = {o.lower().rstrip("/") for o in settings.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server is configured for HTTP only
            return
        malformed = _malformed(scope["headers"])
        # Refusals need these headers too. Without them, a browser reports a failed connection to
        # the page instead of the response.
        more = self._cors_headers(_origin(dict(scope["headers"])))
        if malformed:
            # A proxy and this server could disagree on the end of this request.
            more = [(b"connection", b"close")]
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = (*message.get("headers", ()), *more)
                message["headers"] = [(_usual_case(name), value) for name, value in headers]
            await send(message)

        try:
            if malformed:
                raise RequestError(malformed)
            await self._checked(scope, receive, sending)
        except asyncio.CancelledError:
            if not started:  # the server is stopping
                await refusal(stopping(), scope)(scope, receive, sending)
            raise
        except Exception as e:
            failure = for_client(e)
            if not started:
                await refusal(failure, scope)(scope, receive, sending)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request if it passes every check. Raises the error of the first check that
        fails."""
        headers = dict(scope["headers"])
        origin = _origin(headers)
        method = scope["method"]
        self._check_host(headers.get(b"host"))
        self._check_origin(origin, headers)
        if method == "OPTIONS":
            await _preflight(origin, headers, scope["path"])(scope, receive, send)
            return
        account = self._admitted(scope, headers)
        self._check_body(method, scope["path"], headers)
        if scope["path"].endswith("/"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        CALLER.set(account)
        note_kv_servers(headers.get(KV_SERVERS.encode()))
        limited = account.request() if method == "POST" else account.small_request()
        with limited, body_memory(self.settings):
            await self.app(scope, receive, send)

    def _cors_headers(self, origin: str) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a page of an allowed origin read the response."""
        if not origin or not self._origin_allowed(origin):
            return []
        headers = {**_CORS, "access-control-allow-origin": origin}
        return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]

    def _admitted(self, scope: Scope, headers: dict[bytes, bytes]) -> Account:
        """Return the account of the request, after its connection got a place. Raises
        KeyRequiredError, AuthError, BusyError or RateLimitError."""
        if scope["path"] in _OPEN_PATHS:
            return NOBODY
        account = self._account_of(headers)
        connection = scope.get(CONNECTION)
        if self.settings.checks_user and connection is not None and not connection.of_own_user:
            raise AuthError(
                "another user of this machine started this server",
                hint="ask its user for a key (--api-key), or to start it with --allow-users",
            )
        if connection is not None:
            connection.all.admit(connection, account)
        delegated = headers.get(DELEGATION.encode())
        if delegated is None or not self.settings.keyed:
            return account
        return self._accounts.delegated_account(account, delegated)

    def _check_host(self, value: bytes | None) -> None:
        if value is None:
            raise AuthError("the request has no Host header: send one that names this server")
        if self.settings.unix_socket is not None:
            return
        name = host_name(value.decode("latin-1"))
        if is_loopback(name) or name in self._hosts:
            return
        hint = "use localhost, or allow the name: --allow-host NAME"
        if served_with_key(name):
            if self.settings.keyed:
                return
            hint += "; with a key (--api-key), any name is allowed"
        raise AuthError("the Host header does not name this server", hint=hint)

    def _origin_allowed(self, origin: str) -> bool:
        is_listed = origin.rstrip("/") in self._origins or "*" in self._origins
        if is_listed or origin.startswith(_APP_SCHEMES):
            return True
        scheme, _, authority = origin.partition("://")
        if scheme not in ("http", "https"):
            return False
        name = host_name(authority)
        # Other names below localhost need a key. Only browsers guarantee that they mean this
        # machine.
        is_this_machine = is_loopback(name) or authority in _APP_NAMES
        return is_this_machine or (self.settings.keyed and below_localhost(name))

    def _account_of(self, headers: dict[bytes, bytes]) -> Account:
        """Return the account of the key. Raises KeyRequiredError."""
        if not self.settings.keyed:
            return NOBODY
        key = headers.get(b"x-api-key", b"")
        sent = headers.get(b"authorization", b"")
        if sent[:7].lower() == b"bearer ":
            key = sent[7:]
        account = self._accounts.of(key.strip())
        if account is None:
            raise KeyRequiredError("the API key is missing or wrong")
        return account

    def _check_origin(self, origin: str, headers: dict[bytes, bytes]) -> None:
        if origin and not self._origin_allowed(origin):
            raise AuthError(
                "this origin may not use this server", hint="allow it: --allow-origin ORIGIN"
            )
        if not origin and headers.get(b"sec-fetch-site", b"").strip().lower() == b"cross-site":
            raise AuthError(
                "a web page of another site may not use this server: only allowed origins may"
            )

    def _check_body(self, method: str, path: str, headers: dict[bytes, bytes]) -> None:
        if method not in _BODY_METHODS:
            return
        media_type = "application/json"
        accepted = _accepted_as_json(headers)
        if path.startswith(_FORM_PATHS):
            # Pages of other origins are refused already.
            media_type = "multipart/form-data"
            accepted = _kind(headers) == media_type.encode()
        if not accepted:
            raise MediaTypeError(f"the body must be sent as Content-Type: {media_type}")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise BodyTooLargeError(f"the body is larger than {self.settings.max_body_bytes} bytes")


@lru_cache(maxsize=256)
def _usual_case(name: bytes) -> bytes:
    """Return a header's name as most servers write it. Some programs compare names by case."""
    return name.title()


def _origin(headers: Mapping[bytes, bytes]) -> str:
    return headers.get(b"origin", b"").decode("latin-1").lower()


def _malformed(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the reason why the request can be understood in two ways, or ""."""
    names = [name for name, _ in headers]
    for name in _ONE_ONLY:
        if names.count(name) > 1:
            return f"the request repeats the header {name.decode('latin-1')}"
    if b"transfer-encoding" in names and b"content-length" in names:  # RFC 9112 6.1
        return "the request has both Content-Length and Transfer-Encoding"
    return ""


def _accepted_as_json(headers: dict[bytes, bytes]) -> bool:
    """Return whether a body may be read as JSON.

    Some programs send no type (LiteLLM's Ollama client), or the type of a form (`curl -d`). Such
    bodies are accepted only without the headers that browsers add for pages. An empty body without
    a type is always accepted."""
    kind = _kind(headers)
    if kind == b"application/json" or kind.endswith(b"+json"):
        return True
    if kind not in (b"", _FORM):
        return False
    if not any(_is_browser_header(name) for name in headers):
        return True
    length = headers.get(b"content-length")
    empty = length == b"0" or (length is None and b"transfer-encoding" not in headers)
    return kind == b"" and empty


def _kind(headers: dict[bytes, bytes]) -> bytes:
    return headers.get(b"content-type", b"").split(b";")[0].strip().lower()


def _is_browser_header(name: bytes) -> bool:
    """Return whether only browsers send this header."""
    return name in (b"origin", b"referer") or name.startswith(b"sec-fetch-")


def _preflight(origin: str, request_headers: Mapping[bytes, bytes], path: str) -> Response:
    """Return the answer to OPTIONS: the methods and headers that a page of `origin` may send.
    Without an origin, only the methods."""
    allowed = {"allow": "GET, HEAD, POST, DELETE, OPTIONS"}
    headers = request_headers.get(b"access-control-request-headers", b"authorization, content-type")
    if origin:
        allowed |= {
            "access-control-allow-methods": "GET, POST, DELETE, OPTIONS",
            "access-control-allow-headers": headers.decode("latin-1"),
            "access-control-max-age": "600",
            "vary": "Access-Control-Request-Headers",
        }
        if request_headers.get(b"access-control-request-private-network") == b"true":
            allowed["access-control-allow-private-network"] = "true"
    # On its own paths, llama.cpp's server answers 200.
    is_llamacpp = not path.startswith(("/v1/", "/api/"))
    return Response(status_code=200 if is_llamacpp else 204, headers=allowed)
