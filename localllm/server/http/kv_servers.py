"""The header with which the front of a pool names servers that were given a prompt's system part.

The engine copies the KV of that part from them. It asks only servers that its own settings name
(`--kv-from`), so the header gives a client no access to other servers.
"""

from __future__ import annotations

from contextvars import ContextVar

HEADER = "x-localllm-kv-from"
MAX_SERVERS = 3
_MAX_BYTES = 1024
_NAMED: ContextVar[tuple[str, ...]] = ContextVar("localllm-kv-servers", default=())


def note_kv_servers(sent: bytes | None) -> None:
    """Keep the names in the header of the current request, if it is valid."""
    names: tuple[str, ...] = ()
    if sent and len(sent) <= _MAX_BYTES and sent.isascii():
        names = tuple(name.strip() for name in sent.decode().split(",")[:MAX_SERVERS])
    _NAMED.set(names)


def kv_servers() -> tuple[str, ...]:
    """Return the servers (host:port) that the current request names, in the order to ask."""
    return _NAMED.get()
