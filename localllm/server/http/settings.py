"""What the HTTP server is allowed to do and for whom: one frozen value, safe by default."""

from __future__ import annotations

import ipaddress
import secrets
from dataclasses import dataclass

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")


def is_loopback(host: str) -> bool:
    """True for names and addresses that only this machine can reach."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`allowed_hosts` and `allowed_origins` are added to the loopback names. Sizes in bytes, times in seconds.

    `grace_s`: how long a stream's headers wait for an early error to become an HTTP status. `keepalive_s`: the longest
    silence on a stream. `header_timeout_s`, `body_timeout_s`: how long a client may take to send a request's head, and its
    body. `max_connections`: more than that at once are answered 503.
    """

    host: str = "127.0.0.1"
    port: int = 11535
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    generated_key: bool = False
    unix_socket: str | None = None
    max_body_bytes: int = 32 * 2**20
    max_json_depth: int = 96
    grace_s: float = 0.8
    keepalive_s: float = 10.0
    body_timeout_s: float = 30.0
    header_timeout_s: float = 15.0
    max_connections: int = 512

    @classmethod
    def secure(
        cls,
        *,
        host: str = "127.0.0.1",
        port: int = 11535,
        api_key: str | None = None,
        allowed_hosts: tuple[str, ...] = (),
        allowed_origins: tuple[str, ...] = (),
        unix_socket: str | None = None,
    ) -> ServerSettings:
        """Settings for this address: one that other machines can reach gets a key, made up when none is given."""
        generated = api_key is None and unix_socket is None and not is_loopback(host)
        return cls(
            host=host,
            port=port,
            api_key=secrets.token_urlsafe(24) if generated else api_key,
            allowed_hosts=allowed_hosts,
            allowed_origins=allowed_origins,
            generated_key=generated,
            unix_socket=unix_socket,
        )
