"""Host names and origins: which are this machine, and which a user may allow."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from localllm.errors import UsageError

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain")
# The host's name inside containers: Docker's and Podman's.
_CONTAINER_NAMES = ("host.docker.internal", "host.containers.internal")
# Browsers resolve these to this machine (RFC 6761), other resolvers need not.
_BELOW_LOCALHOST = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*\.localhost")
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def host_name(authority: str) -> str:
    """The host of `name:port`, `[::1]:port` or `name` in lower case; other text unchanged."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        name, closed, rest = authority[1:].partition("]")
        return name if closed and (not rest or rest.startswith(":")) else authority
    return authority.rpartition(":")[0] if authority.count(":") == 1 else authority


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
    """Whether a Host is accepted from requests that show a key: any address, the host's names in containers, and names
    below localhost."""
    return is_address(name) or name in _CONTAINER_NAMES or below_localhost(name)


def allowed_host(text: str) -> str:
    """The host name in the value of `--allow-host`. Raises UsageError."""
    name = host_name(text)
    if name == "*":
        raise UsageError(
            "--allow-host *: with every name allowed any web page could reach this server by pointing its own name here",
            hint="allow the names one by one; an IP address as Host needs nothing but the key",
        )
    if "/" in text or not (is_address(name) or _NAME.fullmatch(name)):
        raise UsageError(f"--allow-host {text!r} must be a host's name", hint="such as nas.lan")
    return name


def image_host(text: str) -> tuple[str, int]:
    """Name and port in the value of `--allow-image-hosts`. Raises UsageError."""
    sent = text.strip().lower()
    name = host_name(sent)
    port = "443" if sent.removeprefix("[").removesuffix("]") == name else sent.rpartition(":")[2]
    if not (is_address(name) or _NAME.fullmatch(name)) or not (port.isdecimal() and 0 < int(port) < 65536):
        raise UsageError(
            f"--allow-image-hosts {text!r} must be a host's name, or name:port",
            hint="such as images.example; every host is named in full, and https is the only way",
        )
    return name, int(port)


def allowed_origin(text: str, *, keyed: bool) -> str:
    """The origin in the value of `--allow-origin`, lower case; `*` and `null` only where a key is required. Raises
    UsageError."""
    origin = text.strip().lower().rstrip("/")
    if origin in ("*", "null"):
        if not keyed:
            raise UsageError(
                f"--allow-origin {origin} lets any web page use this server: it needs a key", hint="add --api-key"
            )
        return origin
    scheme, separator, rest = origin.partition("://")
    parts = urlsplit(origin) if separator else None
    if parts is None or not scheme or not rest or parts.netloc != rest or "@" in rest:
        raise UsageError(
            f"--allow-origin {text!r} must be scheme://host or scheme://host:port", hint="such as https://chat.example"
        )
    return origin
