"""The HTTP client for upstream servers and pool nodes.

aiohttp rather than httpx: httpx removes the socket's reader from the loop and adds it back for each piece, 60 % of a
token's cost through a proxy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError
from localllm.server.http.accounts import delegation
from localllm.server.http.sockets import trusted_certificates
from localllm.server.proxy.usage_meter import UsageMeter

if TYPE_CHECKING:
    import aiohttp

_CONNECT_S = 5.0
_MOST_CONNECTIONS = 512
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
        import aiohttp

        try:
            answer = await self._ask(outgoing)
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

    async def _ask(self, outgoing: ProxyRequest) -> aiohttp.ClientResponse:
        import aiohttp
        from yarl import URL

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=outgoing.silence_s)
        return await self._open_session().request(
            outgoing.method,
            URL(outgoing.url, encoded=True),
            data=outgoing.body or None,
            headers=outgoing.headers(),
            timeout=timeout,
            allow_redirects=False,
            ssl=trusted_certificates() if outgoing.url.startswith("https:") else True,
        )

    async def status(self, url: str, seconds: float) -> int | None:
        """The status of GET `url`; None where nothing answers. TimeoutError where it says nothing for so long."""
        import aiohttp

        try:
            async with self._get(url, None, seconds) as answer:
                return answer.status
        except aiohttp.ClientError as e:
            if isinstance(e, TimeoutError):
                raise
            return None

    async def models(self, url: str, key: str | None) -> Sequence[Mapping[str, object]]:
        """The `data` of GET `url` (a server's /v1/models); empty where it does not answer with one."""
        import aiohttp

        try:
            async with self._get(url, key, _CONNECT_S) as answer:
                answered = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []
        data = answered.get("data") if isinstance(answered, dict) else None
        return [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []

    def _get(self, url: str, key: str | None, seconds: float) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        import aiohttp

        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})}
        timeout = aiohttp.ClientTimeout(total=seconds)
        trusted = trusted_certificates() if url.startswith("https:") else True
        return self._open_session().get(url, headers=headers, timeout=timeout, allow_redirects=False, ssl=trusted)

    def _open_session(self) -> aiohttp.ClientSession:
        """The session; aiohttp wants it created inside a running loop."""
        import aiohttp

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


def is_stream(answer: aiohttp.ClientResponse) -> bool:
    """Whether the answer is streamed: server-sent events, or Ollama's JSON lines."""
    return answer.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))


def upstream_error(outgoing: ProxyRequest, error: Exception) -> UpstreamError:
    """`error` for a client: which server failed and how, without its address."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamError(f"the server {outgoing.name}, which runs this model, can't be reached")
    if isinstance(error, TimeoutError):
        return UpstreamError(f"the server {outgoing.name} said nothing for {outgoing.silence_s:.0f} seconds")
    return UpstreamError(f"the server {outgoing.name} broke off ({type(error).__name__})")
