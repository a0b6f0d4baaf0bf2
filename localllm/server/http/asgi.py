"""ASGI types and the response headers of this server."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


# ASGI scope key of the request's `Connection`. Absent if the request did not come through a
# socket.
CONNECTION = "localllm.connection"
# Figures of the current request's answer, for the log (None: not logged).
LOGGED: ContextVar[list[str] | None] = ContextVar("logged", default=None)
IGNORED = "x-localllm-ignored"
# Response header for a request with a seed: how far its result is repeatable.
SEEDED = "x-localllm-seed"
# The server that answered a proxied request.
RAN_ON = "x-localllm-ran-on"
_MAX_CHARS = 1024
_MAX_NAME_CHARS = 64
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def new_id(kind: str) -> str:
    """Return `kind` followed by a random id that is unique among all answers."""
    return kind + secrets.token_hex(12)


def request_id() -> dict[str, str]:
    """Return the headers with the id of a request, under the names of OpenAI and Anthropic."""
    new = "req_" + secrets.token_hex(8)
    return {"x-request-id": new, "request-id": new}


def answer_headers(ignored: Sequence[str]) -> dict[str, str]:
    """Return the headers of every answer: its id, and the names of fields without effect."""
    return {**request_id(), **ignored_header(ignored)}


def header_text(text: str) -> str:
    """Return `text` as a header's value: printable ASCII of limited length."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:_MAX_CHARS]


def ignored_header(names: Sequence[str]) -> dict[str, str]:
    """Return `x-localllm-ignored`, or {} if `names` is empty. Clients choose the names, so unsafe
    characters are replaced."""
    if not names:
        return {}
    plain = [_UNSAFE.sub("?", name)[:_MAX_NAME_CHARS] for name in dict.fromkeys(names[:_MAX_CHARS])]
    return {IGNORED: ",".join(plain)[:_MAX_CHARS]}
