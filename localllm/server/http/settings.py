"""Settings of the HTTP server, safe by default, and which host names and origins are allowed."""

from __future__ import annotations

import ipaddress
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from localllm.errors import UsageError
from localllm.server.http.accounts import NamedKey

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")
# The host's name inside containers: Docker's and Podman's.
_CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
# Browsers resolve these to this machine (RFC 6761), other resolvers need not.
_BELOW_LOCALHOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.localhost")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

# Limits of `ServerSettings` that are settings of the same names, and can't be 0.
CONNECTION_LIMITS = (
    "max_connections", "max_unknown_connections", "idle_timeout_s", "idle_unknown_timeout_s",
    "header_timeout_s", "body_timeout_s", "min_body_bytes_s",
)  # fmt: skip


def host_name(authority: str) -> str:
    """The host of `name:port`, `[::1]:port` or `name` in lower case; other text unchanged."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        name, closed, rest = authority[1:].partition("]")
        if closed and (not rest or rest.startswith(":")):
            return name
        return authority
    if authority.count(":") == 1:
        return authority.rpartition(":")[0]
    return authority


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host.lower() in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(name: str) -> bool:
    """Whether it is an IP address, which DNS rebinding can't change."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def below_localhost(name: str) -> bool:
    return _BELOW_LOCALHOST.fullmatch(name) is not None


def served_with_key(name: str) -> bool:
    """Whether a Host is accepted from requests that show a key: any address, the host's names in
    containers, and names below localhost."""
    return is_address(name) or name in _CONTAINER_NAMES or below_localhost(name)


def allowed_host(text: str) -> str:
    """The host name in the value of `--allow-host`. Raises UsageError."""
    name = host_name(text)
    if name == "*":
        raise UsageError(
            "--allow-host *: with every name allowed any web page could reach this server by "
            "pointing its own name here",
            hint="allow the names one by one; an IP address as Host needs nothing but the key",
        )
    if "/" in text or not (is_address(name) or _NAME.fullmatch(name)):
        raise UsageError(f"--allow-host {text!r} must be a host's name", hint="such as nas.lan")
    return name


def image_host(text: str) -> tuple[str, int]:
    """Name and port in the value of `--allow-image-hosts`. Raises UsageError."""
    sent = text.strip().lower()
    name = host_name(sent)
    port = "443"
    if sent.removeprefix("[").removesuffix("]") != name:
        port = sent.rpartition(":")[2]
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not is_port or not (is_address(name) or _NAME.fullmatch(name)):
        raise UsageError(
            f"--allow-image-hosts {text!r} must be a host's name, or name:port",
            hint="such as images.example; every host is named in full, and https is the only way",
        )
    return name, int(port)


def allowed_origin(text: str, *, keyed: bool) -> str:
    """The origin in the value of `--allow-origin`, lower case; `*` and `null` only where a key is
    required. Raises UsageError."""
    origin = text.strip().lower().rstrip("/")
    if origin in ("*", "null"):
        if not keyed:
            raise UsageError(
                f"--allow-origin {origin} lets any web page use this server: it needs a key",
                hint="add --api-key",
            )
        return origin
    scheme, _, rest = origin.partition("://")
    if not scheme or not rest or urlsplit(origin).netloc != rest or "@" in rest:
        raise UsageError(
            f"--allow-origin {text!r} must be scheme://host or scheme://host:port",
            hint="such as https://chat.example",
        )
    return origin


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its private key (None: in the same file)."""

    certificate: Path
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """`keys` are accepted besides `api_key`, each with its limits. `allowed_hosts` and
    `allowed_origins` add to the loopback names. Images are fetched only from `image_hosts` (name,
    port).

    `grace_s`: how long a stream's headers wait, so that an early error becomes an HTTP status.
    `keepalive_s`: the longest silence on a stream. `kept_stream_s`: a stream begun with an
    Idempotency-Key waits so long for its client.
    `header_timeout_s`: the longest a client may take to send headers;
    `body_timeout_s` and a second for each `min_body_bytes_s` that have come: a body.
    `max_bodies_bytes`: all large ones together that come or wait to be read.
    `idle_timeout_s`: a connection rests so long between requests, and `idle_unknown_timeout_s`
    before the gate let a request of it in. `max_connections` of requests that were let in, all of
    them busy: further ones are answered 503;
    `max_unknown_connections`: of others, from this machine and from outside each.
    `keeps_awake`: a desktop is kept from idle sleep while requests run.
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
    max_bodies_bytes: int = 256 * 2**20
    grace_s: float = 0.8
    keepalive_s: float = 10.0
    kept_stream_s: float = 120.0
    body_timeout_s: float = 10.0
    min_body_bytes_s: int = 64_000
    header_timeout_s: float = 10.0
    idle_timeout_s: float = 60.0
    idle_unknown_timeout_s: float = 5.0
    max_connections: int = 512
    keeps_awake: bool = False
    max_unknown_connections: int = 64

    @property
    def keyed(self) -> bool:
        """Whether requests need a key."""
        return self.api_key is not None or bool(self.keys)

    def secured(self) -> ServerSettings:
        """These settings, checked; an address that other machines can reach gets a generated key if
        there is none.

        Raises UsageError for an empty key, limits of 0, and for hosts and origins that can't be
        allowed."""
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty", hint="leave --api-key out, or give it a value")
        for name in CONNECTION_LIMITS:
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"{name} must be more than 0: nobody would be served",
                    hint="leave it out for its default",
                )
        if self.tls is not None and self.unix_socket is not None:
            raise UsageError(
                "a Unix socket has no TLS: it does not leave this machine",
                hint="leave --tls-cert out",
            )
        checked = replace(self, generated_key=False)
        if not self.keyed and self.unix_socket is None and not is_loopback(self.host):
            checked = replace(self, generated_key=True, api_key=secrets.token_urlsafe(24))
        hosts = [allowed_host(name) for name in self.allowed_hosts]
        origins = [allowed_origin(name, keyed=checked.keyed) for name in self.allowed_origins]
        return replace(checked, allowed_hosts=tuple(hosts), allowed_origins=tuple(origins))
