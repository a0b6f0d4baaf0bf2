"""What the headers of a request say of the program that sent it, and of the request's purpose."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

_PRODUCT = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Products of HTTP libraries: two such requests may come from different programs.
_LIBRARIES = frozenset(
    {
        "aiohttp", "axios", "curl", "go-http-client", "java-http-client", "node", "okhttp",
        "python-httpx", "python-requests", "python-urllib", "python-urllib3", "undici", "wget",
    }
)  # fmt: skip
# Headers that name the purpose of a request, with the values of work in the background: titles,
# summaries for memory, classifications. Requests of subagents and compactions are not among them,
# because a user waits for their results. Sources: Claude Code 2.1.332, Codex (core/src/client.rs).
_BACKGROUND: Mapping[str, tuple[str, ...]] = {
    "x-claude-code-request-class": ("auxiliary",),
    "x-claude-1p-request-class": ("auxiliary",),
    "x-openai-subagent": ("memory_consolidation",),
    "x-openai-memgen-request": ("true",),
}
# Headers with the id of a session. The requests of an agent and of its subagents have the same id.
# Sources: Claude Code, Codex and the earlier name of Codex's header.
_SESSION = ("x-claude-code-session-id", "session-id", "session_id")
_MAX_SESSION_CHARS = 256


@dataclass(frozen=True, slots=True)
class ClientSigns:
    """`program`: the first product in User-Agent, or "" if it names no program. `background`: a
    header names a purpose for which no user waits. `session`: the id of the session, or ""."""

    program: str = ""
    background: bool = False
    session: str = ""


def signs_of(headers: Mapping[str, str]) -> ClientSigns:
    """Return the signs in a request's headers."""
    product = _PRODUCT.match(headers.get("user-agent", ""))
    program = product[0] if product else ""
    if program.lower() in _LIBRARIES:
        program = ""
    named = (headers.get(name, "").lower() in values for name, values in _BACKGROUND.items())
    sessions = (headers.get(name, "") for name in _SESSION)
    session = next(filter(None, sessions), "")[:_MAX_SESSION_CHARS]
    return ClientSigns(program, any(named), session)


_NONE = ClientSigns()
# The signs of the request that the current task answers.
SIGNS: ContextVar[ClientSigns] = ContextVar("localllm-signs", default=_NONE)
