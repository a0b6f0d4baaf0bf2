"""One line on stderr for each request that `localllm serve` has answered, so that one sees what it is doing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.server.http.asgi import App, Message, Receive, Scope, Send

# Asked again and again by whoever watches a server: worth a line only where they fail.
_WATCHERS = (
    "/health",
    "/v1/health",
    "/metrics",
    "/v1/models",
    "/api/tags",
    "/api/ps",
    "/props",
    "/slots",
    "/v1/responses/input_tokens",
    "/tokenize",
)
_MOST_PATH = 60


def with_lines(app: App, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> App:
    """`app`, telling `say` of each request once it is over: when, what, its status and seconds. Nothing of what was asked or
    answered is told."""

    async def telling(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        started_s, status = clock(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, sending)
        finally:
            if status >= 400 or scope["path"] not in _WATCHERS:
                say(_line(scope, status, clock() - started_s))

    return telling


def _line(scope: Scope, status: int, took_s: float) -> str:
    # A path is whatever a client sent: a terminal must not obey it.
    path = "".join(c if c.isprintable() else "?" for c in scope["path"])
    path = path if len(path) <= _MOST_PATH else path[: _MOST_PATH - 1] + "…"
    said = f"{status}" if status else "left before its answer"
    return f"{time.strftime('%H:%M:%S')}  {scope['method']} {path}  {said}  {took_s:.2f} s"
