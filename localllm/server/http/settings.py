"""Settings of the HTTP server: one frozen value, safe by default."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from localllm.errors import UsageError
from localllm.server.http.accounts import NamedKey
from localllm.server.http.names import allowed_host, allowed_origin, is_loopback


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its private key (None: in the same file)."""

    certificate: Path
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`keys` are accepted besides `api_key`, each with its limits. `allowed_hosts` and `allowed_origins` add to the
    loopback names. Images are fetched only from `image_hosts` (name, port).

    `grace_s`: how long a stream's headers wait, so that an early error becomes an HTTP status. `keepalive_s`: the longest
    silence on a stream. `header_timeout_s`, `body_timeout_s`: the longest a client may take to send headers and body.
    `max_connections`: further ones are answered 503.
    """

    host: str = "127.0.0.1"
    port: int = 11535
    api_key: str | None = None
    keys: tuple[NamedKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    image_hosts: tuple[tuple[str, int], ...] = ()
    generated_key: bool = False
    unix_socket: str | None = None
    tls: TlsFiles | None = None
    max_body_bytes: int = 32 * 2**20
    max_json_depth: int = 96
    grace_s: float = 0.8
    keepalive_s: float = 10.0
    body_timeout_s: float = 30.0
    header_timeout_s: float = 15.0
    max_connections: int = 512

    @property
    def keyed(self) -> bool:
        """Whether requests need a key."""
        return self.api_key is not None or bool(self.keys)

    def secured(self) -> ServerSettings:
        """These settings, checked; an address that other machines can reach gets a generated key if there is none.

        Raises UsageError for an empty key, and for hosts and origins that can't be allowed."""
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty", hint="leave --api-key out, or give it a value")
        if self.tls is not None and self.unix_socket is not None:
            raise UsageError("a Unix socket has no TLS: it does not leave this machine", hint="leave --tls-cert out")
        generated = not self.keyed and self.unix_socket is None and not is_loopback(self.host)
        keyed = generated or self.keyed
        return replace(
            self,
            api_key=secrets.token_urlsafe(24) if generated else self.api_key,
            allowed_hosts=tuple(allowed_host(name) for name in self.allowed_hosts),
            allowed_origins=tuple(allowed_origin(origin, keyed=keyed) for origin in self.allowed_origins),
            generated_key=generated,
        )
