"""The outermost middleware behind the gate: plain paths, HEAD, and errors that nobody answered."""

from __future__ import annotations

import asyncio

from localllm.errors import BusyError, LocalLLMError
from localllm.server.http.asgi import OWN_SEND, WRITE, App, Message, Receive, Scope, Send
from localllm.server.http.errors import internal, log_failure
from localllm.server.http.gate import refuse


class EdgeMiddleware:
    """ASGI middleware: strips trailing slashes, answers HEAD as GET without a body, and turns exceptions into an error
    object, which of unexpected ones says nothing about internals."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"].endswith("/"):
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        if scope["method"] == "HEAD":
            scope = {name: value for name, value in scope.items() if name not in (OWN_SEND, WRITE)} | {"method": "GET"}
            send = _headers_only(send)
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, sending)
        except asyncio.CancelledError:
            if not started:  # the server stops
                await refuse(scope, send, BusyError("the server is stopping", hint="send the request again later"))
            raise
        except Exception as e:
            if not isinstance(e, LocalLLMError):
                log_failure(e)
            if not started:
                await refuse(scope, send, internal(e))


def _headers_only(send: Send) -> Send:
    """`send` without bodies. They end at once: an event stream may have no end."""
    ended = False

    async def sending(message: Message) -> None:
        nonlocal ended
        if message["type"] != "http.response.body":
            await send(message)
        elif not ended:
            ended = True
            await send({"type": "http.response.body", "body": b""})

    return sending
