"""ASGI's types, and the response headers of our own."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


# ASGI scope key of the `Connection` by which the request came; none where it came by no socket.
CONNECTION = "localllm.connection"
IGNORED = "x-localllm-ignored"
# Of a request with a seed: what that does not promise.
SEEDED = "x-localllm-seed"
# The server that answered, where the request was proxied.
RAN_ON = "x-localllm-ran-on"
_MAX_CHARS = 1024
_MAX_NAME_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def new_id(kind: str) -> str:
    """An id that is unique over all answers, behind `kind`."""
    return kind + secrets.token_hex(12)


def request_id() -> dict[str, str]:
    return {"x-request-id": "req_" + secrets.token_hex(8)}


def answer_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Of every answer: its id, and the names of what had no effect."""
    return {**request_id(), **ignored_header(ignored)}


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """`x-localllm-ignored`, if there is something to name. Clients choose the names, so unsafe
    characters are replaced."""
    if not names:
        return {}
    plain = [_UNSAFE.sub("?", name)[:_MAX_NAME_CHARS] for name in dict.fromkeys(names[:_MAX_CHARS])]
    return {IGNORED: ",".join(plain)[:_MAX_CHARS]}
