"""Relays another server's answer to the client byte for byte; a disconnect of the client cancels it."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import Any

import aiohttp

from localllm.errors import LocalLLMError
from localllm.server.http.asgi import OWN_SEND, RAN_ON, Receive, Scope, Send
from localllm.server.http.streaming import unless_gone
from localllm.server.proxy.client import ProxyRequest, is_stream, read_body, upstream_error
from localllm.server.proxy.usage_meter import UsageMeter

# Response headers that are passed on: how to read the body, request ids, rate limits.
_RELAYED = (
    b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"x-request-id", b"x-accel-buffering",
)  # fmt: skip
_RELAYED_FAMILIES = (b"x-ratelimit-", b"openai-", b"x-localllm-")
_RAN_ON = RAN_ON.encode()


def accepted(scope: Scope) -> str:
    """The client's Accept header."""
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == b"accept"), "*/*")


async def relay(answer: aiohttp.ClientResponse, outgoing: ProxyRequest, scope: Scope, send: Send) -> None:
    """Send `answer` to the client, a stream as it comes. Raises UpstreamError as long as nothing was sent."""
    body = None if is_stream(answer) else await read_body(answer, outgoing)
    headers = _relayed_headers(answer, outgoing.name)
    if body is not None:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if body is not None:
        await send({"type": "http.response.body", "body": body})
        return
    send = scope.get(OWN_SEND) or send
    last = b""
    try:
        async for piece in answer.content.iter_any():
            outgoing.meter.feed(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as e:
        last = _error_frame(answer.headers.get("content-type", ""), upstream_error(outgoing, e))
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _relayed_headers(answer: aiohttp.ClientResponse, name: str) -> list[tuple[bytes, bytes]]:
    """The headers of `answer` that the client gets, and the name of the server that sent it."""
    headers = [(k.lower(), v) for k, v in answer.raw_headers]
    relayed = [(k, v) for k, v in headers if k in _RELAYED or k.startswith(_RELAYED_FAMILIES)]
    return [*((k, v) for k, v in relayed if k != _RAN_ON), (_RAN_ON, name.encode("latin-1"))]


def _error_frame(content_type: str, error: LocalLLMError) -> bytes:
    """`error` as the last frame of a stream of that type."""
    value = json.dumps(error.to_openai(), separators=(",", ":")).encode()
    return b"data: " + value + b"\n\n" if "event-stream" in content_type else value + b"\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None], meter: UsageMeter) -> None:
    """Await `work`, cancelled when the client disconnects; closes the request's `meter`. Raises what `work` raises."""

    async def completed() -> bool:
        await work
        return True

    left = True
    try:
        left = await unless_gone(receive, completed()) is None
    except Exception:
        left = False
        raise
    finally:
        meter.close(left=left)
