"""Settings of the HTTP server, with safe defaults, and the checks of host names and origins."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from localllm.addresses import is_address, is_loopback
from localllm.errors import UsageError
from localllm.server.http.accounts import NamedKey
from localllm.server.http.peer_user import reports_users

# The host's name inside containers of Docker and Podman.
_CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
# Browsers resolve these names to this machine (RFC 6761). Other resolvers may not.
_BELOW_LOCALHOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.localhost")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")

# Limits of `ServerSettings` that users can set under the same names. They can't be 0.
CONNECTION_LIMITS = (
    "max_connections", "max_unknown_connections", "idle_timeout_s", "idle_unknown_timeout_s",
    "header_timeout_s", "body_timeout_s", "min_body_bytes_s",
)  # fmt: skip


def host_name(authority: str) -> str:
    """Return the host of `name:port`, `[::1]:port` or `name` in lower case. Other text is only
    converted to lower case."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        name, closed, rest = authority[1:].partition("]")
        if closed and (not rest or rest.startswith(":")):
            return name
        return authority
    if authority.count(":") == 1:
        return authority.rpartition(":")[0]
    return authority


def below_localhost(name: str) -> bool:
    return _BELOW_LOCALHOST.fullmatch(name) is not None


def served_with_key(name: str) -> bool:
    """Return whether the Host `name` is accepted from requests with a key: any IP address, the
    host's names in containers, and names below localhost."""
    return is_address(name) or name in _CONTAINER_NAMES or below_localhost(name)


def allowed_host(text: str) -> str:
    """Return the host name in the value of `--allow-host`. Raises UsageError."""
    name = host_name(text)
    if name == "*":
        raise UsageError(
            "--allow-host * is not allowed: any web page could reach this server by "
            "pointing its own name to it",
            hint="allow the names one by one; an IP address as Host needs only the key",
        )
    if "/" in text or not (is_address(name) or _NAME.fullmatch(name)):
        raise UsageError(f"--allow-host {text!r} must be a host's name", hint="such as nas.lan")
    return name


def image_host(text: str) -> tuple[str, int]:
    """Return the name and port in the value of `--allow-image-hosts`. Raises UsageError."""
    sent = text.strip().lower()
    name = host_name(sent)
    port = "443"
    if sent.removeprefix("[").removesuffix("]") != name:
        port = sent.rpartition(":")[2]
    is_port = port.isdecimal() and 0 < int(port) < 65536
    if not is_port or not (is_address(name) or _NAME.fullmatch(name)):
        raise UsageError(
            f"--allow-image-hosts {text!r} must be a host's name, or name:port",
            hint=(
                "for example images.example; name each host in full, without "
                "a scheme (https is used)"
            ),
        )
    return name, int(port)


def allowed_origin(text: str, *, keyed: bool) -> str:
    """Return the origin in the value of `--allow-origin`, in lower case. `*` and `null` are allowed
    only if a key is required. Raises UsageError."""
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
    """A certificate file with its chain, and the private key's file. `key` None: the key is in the
    same file."""

    certificate: Path
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the HTTP server.

    `keys` are accepted in addition to `api_key`, each with its own limits.
    `allowed_hosts` and `allowed_origins` are accepted in addition to the loopback names.
    `image_hosts`: the only hosts (name, port) from which images are fetched.
    `max_body_bytes`: limit of one body. `max_bodies_bytes`: limit of all large bodies that arrive
    or wait for their prompts.
    `grace_s`: time that a stream's headers wait, so that an early error becomes an HTTP status.
    `keepalive_s`: longest silence on a stream.
    `kept_stream_s`: time that a stream begun with an Idempotency-Key waits for its client.
    `header_timeout_s`: longest time to send the headers.
    `body_timeout_s`: longest time to send a body. One second is added for each
    `min_body_bytes_s` bytes received.
    `idle_timeout_s`: longest idle time of a connection between requests, and longest time in which
    a reader of KV takes no data. `idle_unknown_timeout_s`: longest idle time before the gate has
    admitted a request.
    `max_connections`: limit of admitted connections. If all of them are busy, other requests get
    503.
    `max_unknown_connections`: limit of other connections, counted separately for this machine and
    for others.
    `allow_plain`: KV may be sent unencrypted to other machines.
    `keeps_awake`: keep a desktop from idle sleep while requests run.
    `allow_users`: without a key, answer every user of this machine on loopback."""

    host: str = "127.0.0.1"
    port: int = 11535
    api_key: str | None = None
    keys: tuple[NamedKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    image_hosts: tuple[tuple[str, int], ...] = ()
    generated_key: bool = False
    allow_users: bool = False
    unix_socket: str | None = None
    tls: TlsFiles | None = None
    max_body_bytes: int = 32 * 2**20
    max_bodies_bytes: int = 128 * 2**20
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
    allow_plain: bool = False
    max_unknown_connections: int = 64

    @property
    def keyed(self) -> bool:
        """Whether requests need a key."""
        return self.api_key is not None or bool(self.keys)

    @property
    def checks_user(self) -> bool:
        """Whether only clients of this process's user are answered. With a key or a Unix socket,
        the check is not necessary."""
        return not (self.keyed or self.allow_users or self.unix_socket is not None)

    def _lacks_key(self) -> bool:
        """Return whether a key must be generated."""
        if self.keyed or self.unix_socket is not None:
            return False
        return not is_loopback(self.host) or (self.checks_user and not reports_users())

    def secured(self) -> ServerSettings:
        """Return these settings after checks. A key is generated if there is none and other
        machines can reach the address, or other users of this machine that the system does not
        report.

        Raises UsageError for an empty key, for limits of 0, and for hosts and origins that can't be
        allowed."""
        if self.api_key is not None and not self.api_key.strip():
            raise UsageError("the API key is empty", hint="omit --api-key, or give it a value")
        for name in CONNECTION_LIMITS:
            if getattr(self, name) <= 0:
                raise UsageError(
                    f"{name} must be greater than 0",
                    hint="omit it to use the default",
                )
        if self.tls is not None and self.unix_socket is not None:
            raise UsageError(
                "a Unix socket does not support TLS: its data does not leave this machine",
                hint="leave --tls-cert out",
            )
        checked = replace(self, generated_key=False)
        if self._lacks_key():
            checked = replace(self, generated_key=True, api_key=secrets.token_urlsafe(24))
        hosts = [allowed_host(name) for name in self.allowed_hosts]
        origins = [allowed_origin(name, keyed=checked.keyed) for name in self.allowed_origins]
        return replace(checked, allowed_hosts=tuple(hosts), allowed_origins=tuple(origins))
