"""Where an answer of the hub may lead us: no redirect takes us off encryption, or into this
machine's network."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from localllm.addresses import address_kind
from localllm.errors import DownloadError

_REDIRECT_HINT = (
    "a proxy, hotel network or mirror may be answering for the hub; if HF_ENDPOINT is set, check it"
)


class RedirectRule:
    """Where an answer of the hub at `endpoint` may lead us: never from https to http, to another
    scheme, or into this machine's network.

    A hub (or whoever speaks in its place) names the next address in a redirect. Followed blindly,
    that is a request sent from behind the user's firewall: to a router's page, a cloud's metadata
    service (169.254.169.254), a program on loopback (OWASP, Server-Side Request Forgery). A hub
    that was itself configured on such an address may stay among its like.

    Names are resolved when a redirect comes, as the connection will resolve them a moment later; a
    name that changes its address in between gets past this, and then meets a size and a hash that
    were published before.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host = (parts.hostname or "").lower()
        self._secure = parts.scheme == "https"
        self._own: frozenset[str] | None = None

    def check(self, url: str) -> None:
        """Raise DownloadError if `url` (absolute) may not be asked."""
        scheme, host, port = _parts_of(url)
        if scheme not in ("http", "https", ""):  # before the host: `file:///x` has none
            raise DownloadError(
                f"{self._host} leads to a {scheme[:20]}: address, which is refused",
                hint=_REDIRECT_HINT,
            )
        if not host or not scheme:
            raise DownloadError(
                f"{self._host} leads to no usable address, which is refused", hint=_REDIRECT_HINT
            )
        if self._secure and scheme == "http":
            raise DownloadError(
                f"{self._host} leads to an unencrypted address, which is refused",
                hint=_REDIRECT_HINT,
            )
        if host == self._host:
            return
        if self._own is None:
            self._own = _reaches(self._host, None)
        inner = _reaches(host, port) - self._own - {"public"}
        if inner:
            raise DownloadError(
                f"{self._host} leads to {host[:100]}, a {min(inner)} address, which is refused",
                hint=_REDIRECT_HINT,
            )


def _parts_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of an address; empty if it can't be read."""
    try:
        parts = urlsplit(url)
        return parts.scheme, (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", "", None


def _reaches(host: str, port: int | None) -> frozenset[str]:
    """The kinds of addresses `host` (a name or an address in any spelling) stands for; empty when
    nobody knows it here (behind a proxy that looks names up itself)."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(address_kind(str(entry[4][0])) for entry in found)
