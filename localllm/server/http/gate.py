"""The gate before every route: who may speak to this server, from which page, in which form and how much.

Loopback is not trust: any web page can make the user's browser send requests here. So the Host must be a name of this
machine (DNS rebinding), the Origin, when there is one, must be allowed (foreign pages), a body must say it is JSON
(which a page can't send without a preflight), and a key is compared in constant time where one is set.
"""

from __future__ import annotations

import hmac

from localllm.errors import AuthError, LocalLLMError, RequestError
from localllm.server.http.asgi import App, Message, Receive, Scope, Send
from localllm.server.http.errors import BodyTooLargeError, KeyRequiredError, MediaTypeError, headers_of
from localllm.server.http.json_body import send_json
from localllm.server.http.settings import ServerSettings, is_loopback

# Schemes of desktop programs: a web site can't have such an origin.
_APP_SCHEMES = ("app:", "tauri:", "vscode-webview:", "vscode-file:", "capacitor:")
# Answered without a key: they tell nothing but that a server is here.
_OPEN_PATHS = ("/health", "/v1/health")
_BODY_METHODS = ("POST", "PUT", "PATCH")
_ALLOW_HEADERS = "authorization, content-type, x-api-key, anthropic-version, anthropic-beta, x-requested-with"


class SecurityGate:
    """ASGI middleware that refuses what the settings do not allow, and adds CORS headers for allowed origins."""

    def __init__(self, app: App, settings: ServerSettings) -> None:
        self.app = app
        self.settings = settings
        self._hosts = {h.lower() for h in settings.allowed_hosts} | {settings.host.lower()}
        self._origins = {o.lower().rstrip("/") for o in settings.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request, then pass it on."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"content-type", b"content-length") and name in headers:
                await refuse(send, RequestError(f"the request repeats the header {name.decode('latin-1')}"))
                return
            headers[name] = value
        origin = headers.get(b"origin", b"").decode("latin-1").lower()
        try:
            self._check_host(headers.get(b"host"))
            if origin and not self._origin_allowed(origin):
                raise AuthError("this origin may not use this server", hint="allow it in the server's settings")
            if scope["method"] == "OPTIONS":
                await _preflight(send, origin)
                return
            if scope["path"] not in _OPEN_PATHS:
                self._check_key(headers)
            self._check_body(scope["method"], headers, from_page=bool(origin) or b"sec-fetch-site" in headers)
        except LocalLLMError as e:
            await refuse(send, e)
            return
        await self.app(scope, receive, _with_cors(send, origin) if origin else send)

    def _check_host(self, value: bytes | None) -> None:
        if value is None:
            raise AuthError("the request has no Host header")
        if self.settings.unix_socket is not None:
            return
        name = host_name(value.decode("latin-1"))
        if is_loopback(name) or name in self._hosts:
            return
        raise AuthError("this Host is not a name of this server", hint="use localhost, or allow the name in settings")

    def _origin_allowed(self, origin: str) -> bool:
        if origin.rstrip("/") in self._origins or "*" in self._origins:
            return True
        if origin.startswith(_APP_SCHEMES):
            return True
        scheme, _, rest = origin.partition("://")
        return scheme in ("http", "https") and is_loopback(host_name(rest))

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        if self.settings.api_key is None:
            return
        sent = headers.get(b"authorization", b"")
        key = sent[7:] if sent[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        if not hmac.compare_digest(key.strip(), self.settings.api_key.encode()):
            raise KeyRequiredError("the API key is missing or wrong")

    def _check_body(self, method: str, headers: dict[bytes, bytes], *, from_page: bool) -> None:
        if method not in _BODY_METHODS:
            return
        length = headers.get(b"content-length")
        empty = length == b"0" or (length is None and b"transfer-encoding" not in headers)
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        # Some programs say no type at all (LiteLLM's Ollama client); a page always says its origin.
        unsaid = kind == b"" and (empty or not from_page)
        if not unsaid and kind != b"application/json" and not kind.endswith(b"+json"):
            raise MediaTypeError("the body must be sent as Content-Type: application/json")
        if length is not None and length.isdigit() and int(length) > self.settings.max_body_bytes:
            raise BodyTooLargeError(f"the body is larger than {self.settings.max_body_bytes} bytes")


def host_name(authority: str) -> str:
    """The name in `name:port`, `[::1]:port` or `name`, lower case."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.rpartition(":")[0] if authority.count(":") == 1 else authority


async def refuse(send: Send, error: LocalLLMError) -> None:
    """Answer with `error` as JSON."""
    await send_json(send, error.http_status, error.to_openai(), headers_of(error))


async def _preflight(send: Send, origin: str) -> None:
    headers = [(b"content-length", b"0"), (b"allow", b"GET, HEAD, POST, DELETE, OPTIONS")]
    if origin:
        headers += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", _ALLOW_HEADERS.encode()),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin"),
        ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _with_cors(send: Send, origin: str) -> Send:
    extra = [
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", b"x-localllm-ignored, x-localllm-cache, x-request-id, retry-after"),
        (b"vary", b"Origin"),
    ]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *extra]
        await send(message)

    return sending
