"""What clients sent and what they got: a layer around the server's app that keeps every
exchange."""

from __future__ import annotations

import json
import time
import zlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

# The body of the request that is being served: the scripted model finds in it which tools it was
# offered.
ASKED: ContextVar[dict[str, Any]] = ContextVar("asked", default={})  # noqa: B039 (never changed in place)


@dataclass(slots=True)
class Exchange:
    """One request and its reply. `gone_s`: when the client hung up before the reply ended
    (time.monotonic)."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any = None
    status: int = 0
    reply_headers: dict[str, str] = field(default_factory=dict)
    reply: bytes = b""
    gone_s: float | None = None

    def shape(self) -> str:
        """The request in a line: its path and the fields it has."""
        keys = ", ".join(sorted(self.body)) if isinstance(self.body, dict) else ""
        return f"{self.method} {self.path} {{{keys}}}"


class Recorder:
    """ASGI around ASGI."""

    def __init__(self, app: Any, exchanges: list[Exchange]) -> None:
        self.app = app
        self.exchanges = exchanges

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Keep the exchange and pass everything on."""
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
