"""Other servers over HTTP: one request and the head of its answer, or a word about how it failed.

By aiohttp: its reader hands a piece on as the socket has it. httpx takes the reader off the loop and puts it back for each
piece, which was 60 % of what a token through a server in front cost.
"""

from __future__ import annotations

import functools
import ssl
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.errors import LocalLLMError
from localllm.server.proxy.usage_meter import Meter

if TYPE_CHECKING:
    import aiohttp


class UpstreamError(LocalLLMError):
    """Another server, which a request was handed on to, can't be reached or broke off."""

    code = "upstream_failed"
    http_status = 502
    exit_code = 6
    default_hint = "see whether that server runs; GET /v1/models says which model is where"


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


class Reaching:
    """A client for servers that the settings name: no proxy of the environment, no redirect to where nobody named, no
    cookies. Its connections are kept for the next request; `close` ends them."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def open(self, errand: Errand) -> aiohttp.ClientResponse:
        """The head of the answer, its body still to be read; the caller closes it. Raises UpstreamError."""
        import aiohttp

        try:
            answer = await self._ask(errand)
        except (aiohttp.ClientError, TimeoutError) as e:
            if errand.meter is not None:
                errand.meter.failed()
            raise broken(errand, e) from e
        if errand.meter is not None:
            errand.meter.begun(answer.status, streams=is_stream(answer))
        if 300 <= answer.status < 400:
            answer.close()
            if errand.meter is not None:
                errand.meter.failed()
            raise UpstreamError(
                f"the server {errand.name} sends requests on to another address, which is not followed",
                hint="name the address itself in the settings",
            )
        return answer

    async def _ask(self, errand: Errand) -> aiohttp.ClientResponse:
        import aiohttp
        from yarl import URL

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=errand.silence_s)
        return await self._made().request(
            errand.method,
            URL(errand.url, encoded=True),
            data=errand.body or None,
            headers=errand.headers(),
            timeout=timeout,
            allow_redirects=False,
            ssl=_certificates() if errand.url.startswith("https:") else True,
        )

    async def status(self, url: str, seconds: float) -> int | None:
        """The status of GET `url`; None where nothing answers. TimeoutError where it says nothing for so long."""
        import aiohttp

        try:
            async with self._got(url, None, seconds) as answer:
                return answer.status
        except aiohttp.ClientError as e:
            if isinstance(e, TimeoutError):
                raise
            return None

    async def models(self, url: str, key: str | None) -> Sequence[Mapping[str, object]]:
        """The `data` of GET `url` (a server's /v1/models); empty where it does not answer with one."""
        import aiohttp

        try:
            async with self._got(url, key, _CONNECT_S) as answer:
                said = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return []
        data = said.get("data") if isinstance(said, dict) else None
        return [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []

    def _got(self, url: str, key: str | None, seconds: float) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        import aiohttp

        headers = {"accept-encoding": "identity", **({"authorization": f"Bearer {key}"} if key else {})}
        timeout = aiohttp.ClientTimeout(total=seconds)
        trusted = _certificates() if url.startswith("https:") else True
        return self._made().get(url, headers=headers, timeout=timeout, allow_redirects=False, ssl=trusted)

    def _made(self) -> aiohttp.ClientSession:
        """The session, which can be made only where a loop runs."""
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
        """End its connections."""
        if self._session is not None:
            await self._session.close()


def is_stream(answer: aiohttp.ClientResponse) -> bool:
    """True for an answer that comes piece by piece: server-sent events, or Ollama's lines."""
    return answer.headers.get("content-type", "").startswith(("text/event-stream", "application/x-ndjson"))


def broken(errand: Errand, error: Exception) -> UpstreamError:
    """What a client is told of `error`: which server, and how it failed, not where it lies."""
    import aiohttp

    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return UpstreamError(f"the server {errand.name}, which runs this model, can't be reached")
    if isinstance(error, TimeoutError):
        return UpstreamError(f"the server {errand.name} said nothing for {errand.silence_s:.0f} seconds")
    return UpstreamError(f"the server {errand.name} broke off ({type(error).__name__})")


@functools.cache
def _certificates() -> ssl.SSLContext:
    """Those that httpx trusts too (certifi's): a Python from python.org knows none of the system's."""
    import httpx

    return httpx.create_ssl_context()
