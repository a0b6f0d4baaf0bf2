"""Relays an upstream's answer to the client byte for byte; a disconnect of the client cancels it."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import LocalLLMError
from localllm.server.http.asgi import RAN_ON, Receive, Send
from localllm.server.http.streaming import unless_gone
from localllm.server.proxy.client import ProxyRequest, UpstreamError, upstream_error
from localllm.server.proxy.usage_meter import UsageMeter

if TYPE_CHECKING:
    import aiohttp

# Response headers that are passed on: how to read the body, request ids, rate limits.
_RELAYED = (
    b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"x-request-id", b"x-accel-buffering",
)  # fmt: skip
_RELAYED_FAMILIES = (b"x-ratelimit-", b"openai-", b"x-localllm-")
_RAN_ON = RAN_ON.encode()
_MAX_BODY_BYTES = 256 * 2**20
FrameKind = Literal["comment", "opening", "retry", "token"]
# Events before the first token (Anthropic, Responses).
_OPENINGS = (
    "message_start", "ping", "response.created", "response.in_progress", "response.queued",
    "response.output_item.added", "response.content_part.added",
)  # fmt: skip
# Errors that another node need not have.
_RETRIED = ("server_busy", "worker_died", "other_machine_gone", "upstream_failed")
_EMPTY_VALUES: tuple[object, ...] = (None, "", [], {})


def frame_kind(frame: bytes) -> FrameKind:
    """Classifies one frame of any dialect's stream: until the first `token` a stream can be restarted on another node
    unnoticed. What is not known counts as a token."""
    lines = frame.strip().split(b"\n")
    if all(line.startswith(b":") or not line for line in lines):
        return "comment"
    data = b"".join(line[5:] for line in lines if line.startswith(b"data:")) or lines[-1]
    try:
        value = json.loads(data)
    except ValueError:
        return "token"
    if not isinstance(value, dict):
        return "token"
    error = value.get("error")
    if isinstance(error, dict):
        return "retry" if error.get("code") in _RETRIED or value.get("type") == "overloaded_error" else "token"
    if value.get("type") in _OPENINGS:
        return "opening"
    if value.get("type") == "content_block_start":
        return "opening" if (value.get("content_block") or {}).get("text") == "" else "token"
    choices = value.get("choices")
    return "opening" if isinstance(choices, list) and choices and all(map(_empty, choices)) else "token"


def _empty(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return all(v in _EMPTY_VALUES for k, v in delta.items() if k != "role")


def relayed_headers(answer: aiohttp.ClientResponse, name: str) -> list[tuple[bytes, bytes]]:
    """The headers of `answer` that the client gets, and the name of the server that sent it."""
    headers = [(k.lower(), v) for k, v in answer.raw_headers]
    relayed = [(k, v) for k, v in headers if k in _RELAYED or k.startswith(_RELAYED_FAMILIES)]
    return [*((k, v) for k, v in relayed if k != _RAN_ON), (_RAN_ON, name.encode("latin-1"))]


async def read_whole(answer: aiohttp.ClientResponse, outgoing: ProxyRequest) -> bytes:
    """The body of an answer in one piece. Raises UpstreamError."""
    import aiohttp

    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > _MAX_BODY_BYTES:
                raise UpstreamError(f"the answer of {outgoing.name} is larger than {_MAX_BODY_BYTES} bytes")
            pieces.append(piece)
    except (aiohttp.ClientError, TimeoutError) as e:
        raise upstream_error(outgoing, e) from e
    body = b"".join(pieces)
    outgoing.meter.feed(body)
    return body


async def send_whole(answer: aiohttp.ClientResponse, outgoing: ProxyRequest, body: bytes, send: Send) -> None:
    headers = [*relayed_headers(answer, outgoing.name), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def relay_stream(
    answer: aiohttp.ClientResponse, outgoing: ProxyRequest, send: Send, *, own_send: Send | None = None
) -> None:
    import aiohttp

    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": relayed_headers(answer, outgoing.name),
        }
    )
    send = own_send or send
    last = b""
    try:
        async for piece in answer.content.iter_any():
            outgoing.meter.feed(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as e:
        last = error_frame(answer.headers.get("content-type", ""), upstream_error(outgoing, e))
    await send({"type": "http.response.body", "body": last, "more_body": False})


def error_frame(content_type: str, error: LocalLLMError) -> bytes:
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
