"""Hands one request on to another server and its answer back, byte for byte; leaves with the client that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError
from localllm.server.elsewhere.errors import UpstreamError
from localllm.server.elsewhere.metering import Meter
from localllm.server.http.asgi import Receive, Send
from localllm.server.http.headers import RAN_ON

if TYPE_CHECKING:
    import httpx

# Of an answer's headers: what says how to read it, what the other server says of the request, and of its limits.
_PASSED = ("content-type", "content-encoding", "cache-control", "retry-after", "x-request-id", "x-accel-buffering")
_PASSED_FAMILIES = ("x-ratelimit-", "openai-", "x-localllm-")
_MOST_WHOLE_BYTES = 256 * 2**20
_CONNECT_S = 5.0
_MOST_CONNECTIONS = 512
# Shorter than servers keep an unused connection (uvicorn, vLLM and llama.cpp: 5 s): a request on one that is just being
# closed is lost.
_UNUSED_S = 2.0


@dataclass(frozen=True, slots=True)
class Errand:
    """One request to be handed on: to `url` of the server called `name`, with its `key`. `silence_s`: the longest it may
    say nothing. `meter` hears the answer."""

    name: str
    url: str
    body: bytes
    key: str | None = field(default=None, repr=False)
    silence_s: float = 600.0
    accept: str = "*/*"
    method: str = "POST"
    meter: Meter | None = None

    def headers(self) -> dict[str, str]:
        """What is sent with it: nothing of what the client sent but what it accepts."""
        headers = {"content-type": "application/json", "accept": self.accept, "accept-encoding": "identity"}
        return {**headers, **({"authorization": f"Bearer {self.key}"} if self.key else {})}


def client() -> httpx.AsyncClient:
    """A client for servers that the settings name: no proxy of the environment, no redirect to where nobody named."""
    import httpx

    limits = httpx.Limits(max_connections=_MOST_CONNECTIONS, max_keepalive_connections=64, keepalive_expiry=_UNUSED_S)
    return httpx.AsyncClient(trust_env=False, follow_redirects=False, limits=limits)


async def open_answer(http: httpx.AsyncClient, errand: Errand) -> httpx.Response:
    """The head of the answer, its body still to be read; the caller closes it. Raises UpstreamError."""
    import httpx

    timeout = httpx.Timeout(errand.silence_s, connect=_CONNECT_S)
    asked = http.build_request(
        errand.method, errand.url, content=errand.body, headers=errand.headers(), timeout=timeout
    )
    try:
        answer = await http.send(asked, stream=True)
    except httpx.HTTPError as e:
        if errand.meter is not None:
            errand.meter.failed()
        raise broken(errand, e) from e
    if errand.meter is not None:
        errand.meter.begun(answer.status_code, streams=is_stream(answer))
    if 300 <= answer.status_code < 400:
        await answer.aclose()
        if errand.meter is not None:
            errand.meter.failed()
        raise UpstreamError(
            f"the server {errand.name} sends requests on to another address, which is not followed",
            hint="name the address itself in the settings",
        )
    return answer


def broken(errand: Errand, error: Exception) -> UpstreamError:
    """What a client is told of `error`: which server, and how it failed, not where it lies."""
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return UpstreamError(f"the server {errand.name}, which runs this model, can't be reached")
    if isinstance(error, httpx.TimeoutException):
        return UpstreamError(f"the server {errand.name} said nothing for {errand.silence_s:.0f} seconds")
    return UpstreamError(f"the server {errand.name} broke off ({type(error).__name__})")


def passed_headers(answer: httpx.Response, name: str) -> list[tuple[bytes, bytes]]:
    """The headers of `answer` that its client gets, and which server it is from."""
    kept = [(k, v) for k, v in answer.headers.items() if k in _PASSED or k.startswith(_PASSED_FAMILIES)]
    kept = [(k, v) for k, v in kept if k != RAN_ON]
    return [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (*kept, (RAN_ON, name))]


def is_stream(answer: httpx.Response) -> bool:
    """True for an answer that comes piece by piece: server-sent events, or Ollama's lines."""
    kind: str = answer.headers.get("content-type", "")
    return kind.startswith(("text/event-stream", "application/x-ndjson"))


async def pass_whole(answer: httpx.Response, errand: Errand, send: Send) -> None:
    """An answer in one piece: sent only when all of it is here."""
    await send_whole(answer, errand, await whole(answer, errand), send)


async def whole(answer: httpx.Response, errand: Errand) -> bytes:
    """The body of an answer in one piece. Raises UpstreamError."""
    import httpx

    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in answer.aiter_raw():
            size += len(piece)
            if size > _MOST_WHOLE_BYTES:
                raise UpstreamError(f"the answer of {errand.name} is larger than {_MOST_WHOLE_BYTES} bytes")
            pieces.append(piece)
    except httpx.HTTPError as e:
        raise broken(errand, e) from e
    body = b"".join(pieces)
    if errand.meter is not None:
        errand.meter.hear(body)
    return body


async def send_whole(answer: httpx.Response, errand: Errand, body: bytes, send: Send) -> None:
    """`body` behind the head of `answer`."""
    headers = [*passed_headers(answer, errand.name), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def pass_stream(answer: httpx.Response, errand: Errand, send: Send, *, own_send: Send | None = None) -> None:
    """A stream, each piece as it comes."""
    import httpx

    await send(
        {
            "type": "http.response.start",
            "status": answer.status_code,
            "headers": passed_headers(answer, errand.name),
        }
    )
    send = own_send or send
    last = b""
    try:
        async for piece in answer.aiter_raw():
            if errand.meter is not None:
                errand.meter.hear(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except httpx.HTTPError as e:
        last = error_frame(answer, broken(errand, e))
    await send({"type": "http.response.body", "body": last, "more_body": False})


def error_frame(answer: httpx.Response, error: LocalLLMError) -> bytes:
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


async def list_models(http: httpx.AsyncClient, url: str, key: str | None) -> Sequence[Mapping[str, object]]:
    """The `data` of GET `url` (a server's /v1/models); empty where it does not answer with one."""
    import httpx

    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        said = (await http.get(url, headers=headers, timeout=_CONNECT_S)).json()
    except (httpx.HTTPError, ValueError):
        return []
    data = said.get("data") if isinstance(said, dict) else None
    return [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []
