"""Limits the redirects of the hub: never to unencrypted addresses or into the local network."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from localllm.addresses import address_kind
from localllm.errors import DownloadError

_REDIRECT_HINT = (
    "a proxy, hotel network or mirror may be answering for the hub; if HF_ENDPOINT is set, check it"
)


class RedirectRule:
    """Checks redirects of the hub at `endpoint`.

    It rejects redirects from https to http, to another scheme, and into this machine's network. A
    hub, or a server that impersonates it, chooses the redirect's target. A client that follows it
    blindly sends requests from inside the user's firewall: to a router's page, a cloud's metadata
    service (169.254.169.254), or a program on loopback (OWASP, Server-Side Request Forgery). A hub
    that is configured on such an address may redirect to the same kind.

    Names are resolved when a redirect arrives, shortly before the connection resolves them again. A
    name that changes its address in between passes this check. Its content must then still match
    the size and hash that were published before.
    """

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._host = (parts.hostname or "").lower()
        self._secure = parts.scheme == "https"
        self._own: frozenset[str] | None = None

    def check(self, url: str) -> None:
        """Raise DownloadError if the absolute `url` is not allowed."""
        scheme, host, port = _parts_of(url)
        if scheme not in ("http", "https", ""):  # before the host: `file:///x` has no host
            raise DownloadError(
                f"{self._host} redirects to a {scheme[:20]}: address, which is refused",
                hint=_REDIRECT_HINT,
            )
        if not host or not scheme:
            raise DownloadError(
                f"{self._host} redirects to an unusable address, which is refused",
                hint=_REDIRECT_HINT,
            )
        if self._secure and scheme == "http":
            raise DownloadError(
                f"{self._host} redirects to an unencrypted address, which is refused",
                hint=_REDIRECT_HINT,
            )
        if host == self._host:
            return
        if self._own is None:
            self._own = _reaches(self._host, None)
        inner = _reaches(host, port) - self._own - {"public"}
        if inner:
            raise DownloadError(
                f"{self._host} redirects to {host[:100]}, a {min(inner)} address, which is refused",
                hint=_REDIRECT_HINT,
            )


def _parts_of(url: str) -> tuple[str, str, int | None]:
    """Scheme, host and port of an address, or empty values if it can't be parsed."""
    try:
        parts = urlsplit(url)
        return parts.scheme, (parts.hostname or "").lower(), parts.port
    except ValueError:
        return "", "", None


def _reaches(host: str, port: int | None) -> frozenset[str]:
    """The kinds of addresses that `host` (a name or an address in any spelling) resolves to.

    Empty if it can't be resolved here, e.g. with a proxy that resolves names itself.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return frozenset()
    return frozenset(address_kind(str(entry[4][0])) for entry in found)
