"""The HTTP client for upstream servers and a pool's servers; imported once there are any.

aiohttp rather than httpx: httpx removes the socket's reader from the loop and adds it back for each piece. A piece of a
stream takes 34 microseconds of CPU through aiohttp and 104 through httpx (8 streams at once).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from localllm.errors import LocalLLMError
from localllm.server.http.accounts import delegation
from localllm.server.http.sockets import trusted_certificates
from localllm.server.proxy.usage_meter import UsageMeter

_CONNECT_S = 5.0
_MOST_CONNECTIONS = 512
_MAX_BODY_BYTES = 256 * 2**20
# Shorter than servers keep an unused connection (uvicorn, vLLM and llama.cpp: 5 s): a request on one that is just being
# closed is lost.
_UNUSED_S = 2.0


class UpstreamError(LocalLLMError):
    """An upstream server can't be reached, or broke off."""

    code = "upstream_failed"
    http_status = 502
    exit_code = 6
    default_hint = "see whether that server runs; GET /v1/models says which model is where"


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """One request to the server called `name`, sent with its `key`. `silence_s`: the read timeout. `meter` counts the
    answer's tokens. `whose`: the header that says so, to servers that know us by a key."""

    name: str
    url: str
    body: bytes
    key: str | None = field(default=None, repr=False)
    silence_s: float = 600.0
    accept: str = "*/*"
    method: str = "POST"
    meter: UsageMeter = field(default_factory=UsageMeter)
    whose: Mapping[str, str] = field(default_factory=delegation)

    def headers(self) -> dict[str, str]:
        """Of the client's own headers only Accept is passed on."""
        headers = {"content-type": "application/json", "accept": self.accept, "accept-encoding": "identity"}
        return {**headers, **({"authorization": f"Bearer {self.key}", **self.whose} if self.key else {})}


class UpstreamClient:
    """Talks only to servers that the settings name: no proxies of the environment, no redirects, no cookies."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def open(self, outgoing: ProxyRequest) -> aiohttp.ClientResponse:
        """Send it; returns when the headers are here. The caller reads the body and closes. Raises UpstreamError."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=outgoing.silence_s)
        try:
            answer = await self._open_session().request(
                outgoing.method,
                URL(outgoing.url, encoded=True),
                data=outgoing.body or None,
                headers=outgoing.headers(),
                timeout=timeout,
                allow_redirects=False,
                ssl=trusted_certificates() if outgoing.url.startswith("https:") else True,
            )
        except (aiohttp.ClientError, TimeoutError) as e:
            outgoing.meter.fail()
            raise upstream_error(outgoing, e) from e
        outgoing.meter.begin(answer.status, streams=is_stream(answer))
        if 300 <= answer.status < 400:
            answer.close()
            outgoing.meter.fail()
            raise UpstreamError(
                f"the server {outgoing.name} sends requests on to another address, which is not followed",
                hint="name the address itself in the settings",
            )
        return answer

    async def models(self, url: str, key: str | None) -> Sequence[Mapping[str, object]]:
        """The `data` of GET `url` (a server's /v1/models); empty where it does not answer with one."""
        outgoing = ProxyRequest("", url, b"", key, _CONNECT_S, method="GET", whose={})
        try:
            answer = await self.open(outgoing)
            try:
                answered = json.loads(await read_body(answer, outgoing))
            finally:
                answer.close()
        except (UpstreamError, ValueError):
            return []
        data = answered.get("data") if isinstance(answered, dict) else None
        return [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []

    def _open_session(self) -> aiohttp.ClientSession:
        """The session; aiohttp wants it created inside a running loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MOST_CONNECTIONS, keepalive_timeout=_UNUSED_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("user-agent", "content-type"),
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def read_body(answer: aiohttp.ClientResponse, outgoing: ProxyRequest) -> bytes:
    """The body of an answer in one piece. Raises UpstreamError."""
    body = bytearray()
    try:
        async for piece in answer.content.iter_any():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                raise UpstreamError(f"the answer of {outgoing.name} is larger than {_MAX_BODY_BYTES} bytes")
    except (aiohttp.ClientError, TimeoutError) as e:
        raise upstream_error(outgoing, e) from e
    outgoing.meter.feed(bytes(body))
    return bytes(body)


def is_stream(answer: aiohttp.ClientResponse) -> bool:
    """Whether the answer is streamed: server-sent events, or Ollama's JSON lines."""
    return answer.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))


def upstream_error(outgoing: ProxyRequest, error: Exception) -> UpstreamError:
    """`error` for a client: which server failed and how, without its address."""
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamError(f"the server {outgoing.name}, which runs this model, can't be reached")
    if isinstance(error, TimeoutError):
        return UpstreamError(f"the server {outgoing.name} said nothing for {outgoing.silence_s:.0f} seconds")
    return UpstreamError(f"the server {outgoing.name} broke off ({type(error).__name__})")
