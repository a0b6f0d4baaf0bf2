"""A layer around the server's app that records every request and reply of a client."""

from __future__ import annotations

import json
import time
import zlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

# The body of the current request. The scripted model reads the offered tools from it.
ASKED: ContextVar[dict[str, Any]] = ContextVar("asked", default={})  # noqa: B039 (never changed in place)


@dataclass(slots=True)
class Exchange:
    """One request and its reply. `gone_s`: the time (time.monotonic) at which the client
    disconnected before the reply ended."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    status: int = 0
    reply_headers: dict[str, str] = field(default_factory=dict)
    reply: bytes = b""
    gone_s: float | None = None

    def shape(self) -> str:
        """Return the request in one line: its path and its fields."""
        keys = ", ".join(sorted(self.body)) if isinstance(self.body, dict) else ""
        return f"{self.method} {self.path} {{{keys}}}"


class Recorder:
    """An ASGI app around an ASGI app."""

    def __init__(self, app: Any, exchanges: list[Exchange]) -> None:
        self.app = app
        self.exchanges = exchanges

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Record the exchange and pass everything on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {k.decode().lower(): v.decode("latin-1") for k, v in scope["headers"]}
        query = scope.get("query_string", b"").decode()
        seen = Exchange(scope["method"], scope["path"] + ("?" + query if query else ""), headers)
        self.exchanges.append(seen)
        messages, whole = [], b""
        while True:
            message = await receive()
            messages.append(message)
            whole += message.get("body", b"")
            if message["type"] != "http.request" or not message.get("more_body"):
                break
        seen.body = _json(whole, headers.get("content-encoding", ""))
        ASKED.set(seen.body if isinstance(seen.body, dict) else {})

        async def receiving() -> Any:
            message = messages.pop(0) if messages else await receive()
            if message["type"] == "http.disconnect":
                seen.gone_s = seen.gone_s or time.monotonic()
            return message

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                seen.reply_headers = {
                    k.decode().lower(): v.decode("latin-1") for k, v in message["headers"]
                }
            seen.reply += message.get("body", b"")
            await send(message)

        await self.app(scope, receiving, sending)


def _json(data: bytes, encoding: str) -> Any:
    try:
        if encoding in ("gzip", "deflate"):
            data = zlib.decompress(data, 47)
        return json.loads(data) if data else None
    except (ValueError, zlib.error):
        return data[:200].decode("utf-8", "replace")
