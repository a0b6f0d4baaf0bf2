"""Hands one request on to another server and its answer back, byte for byte; leaves with the client that leaves."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Literal

from localllm.errors import LocalLLMError
from localllm.server.http.asgi import RAN_ON, Receive, Send
from localllm.server.proxy.client import Errand, UpstreamError, broken
from localllm.server.proxy.usage_meter import Meter

if TYPE_CHECKING:
    import aiohttp

Kind = Literal["comment", "opening", "retry", "token"]
# Events that say that there will be an answer (Anthropic's, Responses').
_OPENINGS = (
    "message_start", "ping", "response.created", "response.in_progress", "response.queued",
    "response.output_item.added", "response.content_part.added",
)  # fmt: skip
# Errors of a server that another one need not have.
_RETRIED = ("server_busy", "worker_died", "other_machine_gone", "upstream_failed")
_SAYS_NOTHING: tuple[object, ...] = (None, "", [], {})


def kind_of(frame: bytes) -> Kind:
    """What one frame (with or without the blank line behind it) is."""
    lines = frame.strip().split(b"\n")
    if all(line.startswith(b":") or not line for line in lines):
        return "comment"
    data = b"".join(line[5:] for line in lines if line.startswith(b"data:")) or lines[-1]
    try:
        said = json.loads(data)
    except ValueError:
        return "token"
    if not isinstance(said, dict):
        return "token"
    error = said.get("error")
    if isinstance(error, dict):
        return "retry" if error.get("code") in _RETRIED or said.get("type") == "overloaded_error" else "token"
    if said.get("type") in _OPENINGS:
        return "opening"
    if said.get("type") == "content_block_start":
        return "opening" if (said.get("content_block") or {}).get("text") == "" else "token"
    choices = said.get("choices")
    return "opening" if isinstance(choices, list) and choices and all(map(_empty, choices)) else "token"


def _empty(choice: Any) -> bool:
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return False
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return False
    return all(v in _SAYS_NOTHING for k, v in delta.items() if k != "role")


# Of an answer's headers: what says how to read it, what the other server says of the request, and of its limits.
_PASSED = (
    b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"x-request-id", b"x-accel-buffering",
)  # fmt: skip
_PASSED_FAMILIES = (b"x-ratelimit-", b"openai-", b"x-localllm-")
_RAN_ON = RAN_ON.encode()
_MOST_WHOLE_BYTES = 256 * 2**20


def passed_headers(answer: aiohttp.ClientResponse, name: str) -> list[tuple[bytes, bytes]]:
    """The headers of `answer` that its client gets, and which server it is from."""
    said = [(k.lower(), v) for k, v in answer.raw_headers]
    kept = [(k, v) for k, v in said if k in _PASSED or k.startswith(_PASSED_FAMILIES)]
    return [*((k, v) for k, v in kept if k != _RAN_ON), (_RAN_ON, name.encode("latin-1"))]


async def pass_whole(answer: aiohttp.ClientResponse, errand: Errand, send: Send) -> None:
    """An answer in one piece: sent only when all of it is here."""
    await send_whole(answer, errand, await whole(answer, errand), send)


async def whole(answer: aiohttp.ClientResponse, errand: Errand) -> bytes:
    """The body of an answer in one piece. Raises UpstreamError."""
    import aiohttp

    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in answer.content.iter_any():
            size += len(piece)
            if size > _MOST_WHOLE_BYTES:
                raise UpstreamError(f"the answer of {errand.name} is larger than {_MOST_WHOLE_BYTES} bytes")
            pieces.append(piece)
    except (aiohttp.ClientError, TimeoutError) as e:
        raise broken(errand, e) from e
    body = b"".join(pieces)
    if errand.meter is not None:
        errand.meter.hear(body)
    return body


async def send_whole(answer: aiohttp.ClientResponse, errand: Errand, body: bytes, send: Send) -> None:
    """`body` behind the head of `answer`."""
    headers = [*passed_headers(answer, errand.name), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def pass_stream(
    answer: aiohttp.ClientResponse, errand: Errand, send: Send, *, own_send: Send | None = None
) -> None:
    """A stream, each piece as it comes."""
    import aiohttp

    await send(
        {
            "type": "http.response.start",
            "status": answer.status,
            "headers": passed_headers(answer, errand.name),
        }
    )
    send = own_send or send
    last = b""
    try:
        async for piece in answer.content.iter_any():
            if errand.meter is not None:
                errand.meter.hear(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as e:
        last = error_frame(answer, broken(errand, e))
    await send({"type": "http.response.body", "body": last, "more_body": False})


def error_frame(answer: aiohttp.ClientResponse, error: LocalLLMError) -> bytes:
    """`error` as the last frame of a stream like `answer`."""
    return error_frame_as(answer.headers.get("content-type", ""), error)


def error_frame_as(content_type: str, error: LocalLLMError) -> bytes:
    """`error` as the last frame of a stream of that type."""
    said = json.dumps(error.to_openai(), separators=(",", ":")).encode()
    return b"data: " + said + b"\n\n" if "event-stream" in content_type else said + b"\n"


async def while_there(receive: Receive, work: asyncio.Task[None], meter: Meter | None = None) -> None:
    """Until `work` is done; ends it when the client leaves. Raises what it ended in. Closes the `meter` of the request."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        work.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await asyncio.wait({work})
        if not work.cancelled():
            work.result()
    finally:
        left = not work.done() or work.cancelled()
        work.cancel()
        watcher.cancel()
        await asyncio.gather(work, watcher, return_exceptions=True)
        if meter is not None:
            meter.close(left=left)
