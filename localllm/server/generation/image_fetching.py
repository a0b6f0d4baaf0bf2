"""Fetches images by URL, only from hosts named by `--allow-image-hosts`.

Each host name is resolved once, and the connection uses that address. This prevents DNS rebinding.
Proxies from the environment are not used, because they would resolve the name again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from localllm.addresses import address_kind, is_address, is_loopback
from localllm.conversation.images import AttachedImage
from localllm.errors import RequestError
from localllm.server.http.accounts import caller
from localllm.server.http.recent import RecentlyUsed
from localllm.server.http.sockets import trusted_certificates

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 20 * 10**6
# The same limit as for a request body.
MAX_REQUEST_BYTES = 32 * 2**20
MAX_IMAGES = 64
_MAX_REDIRECTS = 3
_CONNECT_S = 5.0
_TIME_LIMIT_S = 20.0
# A conversation sends the URLs of its images again with every turn.
_CACHE_TTL_S = 600.0
_CACHE_BYTES = 64 * 2**20
_CACHED_IMAGES = 4096
_MAX_PARALLEL = 8

Messages = Sequence[Mapping[str, Any]]


@dataclass
class _FetchBudget:
    """The images and bytes that one request may still fetch."""

    images: int
    n_bytes: int = MAX_REQUEST_BYTES


def _image_bytes(cached: tuple[bytes, float]) -> int:
    return len(cached[0])


def _no_images() -> RecentlyUsed[str, tuple[bytes, float]]:
    return RecentlyUsed(_CACHED_IMAGES, _CACHE_BYTES, _image_bytes)


def _fetching_slots() -> asyncio.Semaphore:
    return asyncio.Semaphore(_MAX_PARALLEL)


@dataclass
class ImageFetcher:
    """Fetches images from `hosts` (name, port), only with https. `time_limit_s`: time limit for one
    image in seconds. `max_images`: limit per request."""

    hosts: Collection[tuple[str, int]] = ()
    time_limit_s: float = _TIME_LIMIT_S
    max_images: int = MAX_IMAGES
    # Images by the caller's scope and URL, with the time when each expires.
    _cache: RecentlyUsed[str, tuple[bytes, float]] = field(default_factory=_no_images)
    _slots: asyncio.Semaphore = field(default_factory=_fetching_slots)

    async def fetched(self, messages: Messages) -> Messages:
        """`messages` with their images fetched, or with the reason why fetching failed."""
        images = chain.from_iterable(message.get("images", ()) for message in messages)
        addresses = sorted({image.address for image in images if image.address})
        if not addresses or not self.hosts:
            return messages
        budget = _FetchBudget(self.max_images)
        answers = await asyncio.gather(*(self._fetch(address, budget) for address in addresses))
        return [_with(message, dict(zip(addresses, answers, strict=True))) for message in messages]

    async def _fetch(self, address: str, budget: _FetchBudget) -> bytes | str | None:
        """The file at `address`, or the reason why it can't be fetched; None if its host is not
        allowed."""
        import httpx

        try:
            if not self._allowed(httpx.URL(address)):
                return None
            # Otherwise the time would tell whether another key has sent the same address.
            entry = f"{caller().cache_scope}\n{address}"
            cached = self._cache.get(entry)
            if cached is not None and time.monotonic() < cached[1]:
                return cached[0]
            budget.images -= 1
            if budget.images < 0:
                return f"{self.max_images} images per request are fetched"
            async with self._slots, asyncio.timeout(self.time_limit_s):
                data = await self._follow(httpx.URL(address), budget)
        except httpx.InvalidURL:
            return None
        except RequestError as e:
            return e.message
        except TimeoutError:
            return f"the image could not be fetched within {self.time_limit_s:.0f} seconds"
        except (httpx.HTTPError, OSError) as e:
            return f"the image could not be fetched: {type(e).__name__}"
        return self._cache.put(entry, (data, time.monotonic() + _CACHE_TTL_S))[0]

    def _allowed(self, url: httpx.URL) -> bool:
        """True if the host is allowed. Raises RequestError for an allowed host without https."""
        named = (url.host.lower(), url.port or 443) in self.hosts
        if url.scheme == "https" and named and not url.userinfo:
            return True
        if url.scheme == "http" and any(url.host.lower() == name for name, _ in self.hosts):
            raise RequestError("images are fetched only over https")
        return False

    async def _follow(self, url: httpx.URL, budget: _FetchBudget) -> bytes:
        import httpx

        async with httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            verify=trusted_certificates(),
            timeout=httpx.Timeout(10, connect=_CONNECT_S),
        ) as client:
            for _ in range(_MAX_REDIRECTS + 1):
                there = await _get(client, url, budget)
                if isinstance(there, bytes):
                    return there
                url = url.join(there)
                if not self._allowed(url):
                    raise RequestError(
                        "the image's host redirects to a host that is not "
                        "allowed (--allow-image-hosts)"
                    )
        raise RequestError(f"the image's host redirected more than {_MAX_REDIRECTS} times")


def _with(
    message: Mapping[str, Any], answers: Mapping[str, bytes | str | None]
) -> Mapping[str, Any]:
    """`message` with its images replaced by the fetched ones."""
    images = []
    content = message["content"]
    for image in message.get("images", ()):
        answer = answers.get(image.address)
        now: AttachedImage = image
        if isinstance(answer, bytes):
            now = image.fetched(answer)
            content = content.replace(image.mark, now.mark, 1)
        elif answer is not None:
            now = replace(image, problem=answer)
        images.append(now)
    if images:
        return {**message, "images": images, "content": content}
    return message


async def _get(client: httpx.AsyncClient, url: httpx.URL, budget: _FetchBudget) -> bytes | str:
    """The file at `url`, or the address it redirects to."""
    import httpx

    for ip in await _addresses(url.host, url.port or 443):
        headers = {
            "host": url.netloc.decode("ascii"),
            "accept": "image/*",
            "accept-encoding": "identity",
        }
        outgoing = client.build_request(
            "GET", url.copy_with(host=ip), headers=headers, extensions={"sni_hostname": url.host}
        )
        try:
            answer = await client.send(outgoing, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            continue
        try:
            return await _read(answer, budget)
        finally:
            await answer.aclose()
    raise RequestError("the image's host can't be reached: send the image in base64")


async def _read(answer: httpx.Response, budget: _FetchBudget) -> bytes | str:
    if answer.has_redirect_location:
        return str(answer.headers["location"])
    if answer.status_code != 200:
        raise RequestError(f"the image's host answered with status {answer.status_code}")
    data = bytearray()
    async for piece in answer.aiter_raw():
        data += piece
        budget.n_bytes -= len(piece)
        if len(data) > MAX_BYTES:
            raise RequestError(f"the image has more than {MAX_BYTES} bytes")
        if budget.n_bytes < 0:
            raise RequestError(
                f"the images of this request have more than {MAX_REQUEST_BYTES} bytes together"
            )
    return bytes(data)


async def _addresses(host: str, port: int) -> list[str]:
    """The IP addresses of `host`. Raises RequestError if one is in a private network, unless `host`
    is itself an IP address or `localhost`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise RequestError(
            "the image's host name can't be resolved: send the image in base64"
        ) from e
    ips = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    meant = {"public", "loopback"} if is_loopback(host) else {"public"}
    if is_address(host):
        inner = set()
    else:
        inner = {address_kind(ip) for ip in ips} - meant
    if inner:
        raise RequestError(f"the image's host has a {min(inner)} address, which is not allowed")
    return ips
