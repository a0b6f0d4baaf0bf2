"""Sends requests to other servers and relays their answers to the client byte for byte.

It is imported only if there are other servers. It uses aiohttp, because httpx removes the socket's
reader from the loop and adds it again for each piece. A piece of a stream takes 34 microseconds of
CPU with aiohttp and 104 with httpx (8 streams at the same time).
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from localllm.errors import LocalLLMError
from localllm.foreign_json import MAX_BYTES, MalformedError, check_uncompressed, parse
from localllm.server.http.accounts import delegation, request_answered
from localllm.server.http.asgi import CONNECTION, RAN_ON, Receive, Scope, Send
from localllm.server.http.kv_servers import HEADER as KV_SERVERS
from localllm.server.http.sockets import trusted_certificates
from localllm.server.http.streaming import cancel_on_disconnect
from localllm.server.proxy.model_list import listed
from localllm.server.proxy.usage_meter import UsageMeter

_log = logging.getLogger(__name__)
_CONNECT_S = 5.0
_MAX_CONNECTIONS = 512
_MAX_BODY_BYTES = 256 * 2**20
# Shorter than servers keep an unused connection (uvicorn, vLLM and llama.cpp: 5 s). A request on a
# connection that is just being closed is lost.
_UNUSED_S = 2.0


class UpstreamError(
    LocalLLMError,
    code="upstream_failed",
    http_status=502,
    exit_code=6,
    default_hint="check that the server runs; GET /v1/models lists the server of each model",
):
    """An upstream server can't be reached, or broke the connection."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """One request to the server called `name`, sent with its `key`.

    `silence_s` is the read timeout. `meter` counts the answer's tokens. `delegation_headers` is the
    delegation header, which names the caller by a pseudonym. It is sent only with a `key`.
    `kv_servers`: servers (host:port) from which the KV of the system prompt can be copied.
    """

    name: str
    url: str
    body: bytes
    key: str | None = field(default=None, repr=False)
    silence_s: float = 600.0
    accept: str = "*/*"
    method: str = "POST"
    meter: UsageMeter = field(default_factory=UsageMeter)
    delegation_headers: Mapping[str, str] = field(default_factory=delegation)
    kv_servers: Sequence[str] = ()

    def headers(self) -> dict[str, str]:
        """The headers to send. Accept is the only header of the client among them."""
        headers = {
            "content-type": "application/json",
            "accept": self.accept,
            "accept-encoding": "identity",
        }
        if self.key:
            headers |= {"authorization": f"Bearer {self.key}", **self.delegation_headers}
        if self.kv_servers:
            headers[KV_SERVERS] = ",".join(self.kv_servers)
        return headers


class UpstreamClient:
    """HTTP client for the servers in the settings: no environment proxies, redirects or cookies."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self, outgoing: ProxyRequest) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send the request and yield the answer once its headers have arrived. Raises
        UpstreamError."""
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_S, sock_read=outgoing.silence_s
        )
        try:
            certificates: ssl.SSLContext | bool = True
            if outgoing.url.startswith("https:"):
                certificates = trusted_certificates()
            answer = await self._open_session().request(
                outgoing.method,
                URL(outgoing.url, encoded=True),
                data=outgoing.body or None,
                headers=outgoing.headers(),
                timeout=timeout,
                allow_redirects=False,
                ssl=certificates,
            )
        except (aiohttp.ClientError, TimeoutError) as e:
            raise upstream_error(outgoing, e) from e
        outgoing.meter.begin(answer.status, streams=is_stream(answer))
        try:
            if 300 <= answer.status < 400:
                raise UpstreamError(
                    f"the server {outgoing.name} redirected to another address, and "
                    "redirects are not followed",
                    hint="enter the final address in the settings",
                )
            yield answer
        finally:
            answer.close()

    async def relay(
        self, outgoing: ProxyRequest, scope: Scope, send: Send, refused: Collection[int] = ()
    ) -> bool:
        """Send the request and relay the answer; a stream is relayed piece by piece.

        Returns False if the status is among the `refused`. Raises UpstreamError if an error occurs
        before the first byte was sent to the client.
        """
        async with self.open(outgoing) as answer:
            if answer.status in refused:
                return False
            body = None
            if not is_stream(answer):
                body = await read_body(answer, outgoing)
            headers = _relayed_headers(answer, outgoing.name)
            if body is not None:
                headers.append((b"content-length", str(len(body)).encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            if body is None:
                connection = scope.get(CONNECTION)
                if connection is not None:
                    send = connection.send
                body = await _relay_pieces(answer, outgoing, send)
            request_answered()
            await send({"type": "http.response.body", "body": body})
            return True

    async def models(self, name: str, url: str, key: str | None) -> Sequence[Mapping[str, object]]:
        """The models in the answer to GET `url` (a server's /v1/models), as strict JSON.

        Empty if there is no usable answer. The log gives the reason.
        """
        outgoing = ProxyRequest(
            name, url, b"", key, _CONNECT_S, method="GET", delegation_headers={}
        )
        try:
            async with self.open(outgoing) as answer:
                check_uncompressed(answer.headers.get("content-encoding"))
                return listed(parse(await read_body(answer, outgoing, MAX_BYTES)))
        except UpstreamError as e:
            _log.warning(f"the models of the upstream {name} are not known: {e.message}")
        except MalformedError as e:
            _log.warning(f"the list of models of the upstream {name} can't be used: {e.message}")
        return []

    def _open_session(self) -> aiohttp.ClientSession:
        """The session. aiohttp requires a running loop to create it."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS, keepalive_timeout=_UNUSED_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "content-type"),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def read_body(
    answer: aiohttp.ClientResponse, outgoing: ProxyRequest, most_bytes: int = _MAX_BODY_BYTES
) -> bytes:
    """The body of an answer in one piece. Raises UpstreamError."""
    body = bytearray()
    try:
        async for piece in answer.content.iter_any():
            body += piece
            if len(body) > most_bytes:
                raise UpstreamError(
                    f"the answer of {outgoing.name} is larger than {most_bytes} bytes"
                )
    except (aiohttp.ClientError, TimeoutError) as e:
        raise upstream_error(outgoing, e) from e
    outgoing.meter.feed(bytes(body))
    return bytes(body)


def is_stream(answer: aiohttp.ClientResponse) -> bool:
    """True if the answer is streamed: server-sent events, or Ollama's JSON lines."""
    return answer.headers.get("content-type", "").startswith(
        ("text/event-stream", "application/x-ndjson")
    )


def upstream_error(outgoing: ProxyRequest, error: Exception) -> UpstreamError:
    """`error` for a client: which server failed and how, without its address."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamError(f"the server {outgoing.name}, which runs this model, can't be reached")
    if isinstance(error, TimeoutError):
        return UpstreamError(
            f"the server {outgoing.name} sent no data for {outgoing.silence_s:.0f} seconds"
        )
    return UpstreamError(
        f"the server {outgoing.name} ended the connection early ({type(error).__name__})"
    )


# Response headers that are relayed: body format, request ids, rate limits.
_RELAYED = (
    b"content-type", b"content-encoding", b"cache-control", b"retry-after", b"x-request-id",
    b"x-accel-buffering",
)  # fmt: skip
_RELAYED_FAMILIES = (b"x-ratelimit-", b"openai-", b"x-localllm-")
_RAN_ON = RAN_ON.encode()


def accepted(scope: Scope) -> str:
    """The client's Accept header."""
    return next((v.decode("latin-1") for k, v in scope["headers"] if k == b"accept"), "*/*")


async def _relay_pieces(
    answer: aiohttp.ClientResponse, outgoing: ProxyRequest, send: Send
) -> bytes:
    """Relay a stream piece by piece and return its last frame: an error if it broke off, else
    empty."""
    try:
        async for piece in answer.content.iter_any():
            outgoing.meter.feed(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as e:
        error = upstream_error(outgoing, e).to_openai()
        error_text = json.dumps(error, separators=(",", ":")).encode()
        events = "event-stream" in answer.headers.get("content-type", "")
        if events:
            return b"data: " + error_text + b"\n\n"
        return error_text + b"\n"
    return b""


def _relayed_headers(answer: aiohttp.ClientResponse, name: str) -> list[tuple[bytes, bytes]]:
    """The headers of `answer` for the client, plus the name of the server that sent it."""
    headers = [(k.lower(), v) for k, v in answer.raw_headers]
    relayed = [(k, v) for k, v in headers if k in _RELAYED or k.startswith(_RELAYED_FAMILIES)]
    return [*((k, v) for k, v in relayed if k != _RAN_ON), (_RAN_ON, name.encode("latin-1"))]


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, bool], meter: UsageMeter
) -> None:
    """Await `work`, which is cancelled when the client disconnects, and close the request's
    `meter`.

    Raises the errors of `work`.
    """
    left = True
    try:
        left = await cancel_on_disconnect(receive, work) is None
    except Exception:
        left = False
        raise
    finally:
        meter.close(left=left)
