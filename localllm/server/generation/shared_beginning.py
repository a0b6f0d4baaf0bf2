"""Finds the part of a chat prompt that other conversations have too: system prompt and tools."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from localllm.conversation.template import TemplateError
from localllm.engine.messages import SharedPrefix

# characters. A shorter prompt has fewer tokens than are worth a question to another server.
_MIN_CHARS = 1024
# A question that no client asks. Two prompts differ from its first character on.
_PROBE = "\u2402"

Messages = Sequence[Mapping[str, Any]]


async def shared_beginning(
    prompt: str,
    messages: Messages,
    render: Callable[[Messages], Awaitable[str]],
    servers: tuple[str, ...],
) -> SharedPrefix | None:
    """The beginning of `prompt` that does not depend on the user's messages, which `servers` may
    have. Returns None without servers, and if the template can't render such a prompt."""
    system = [*takewhile(lambda message: message["role"] == "system", messages)]
    if not servers or len(prompt) < _MIN_CHARS:
        return None
    try:
        other = await render([*system, {"role": "user", "content": _PROBE}])
    except TemplateError:
        return None
    n_most = min(len(prompt), len(other))
    n_same = bisect_left(range(1, n_most + 1), True, key=lambda n: prompt[:n] != other[:n])
    return SharedPrefix(servers, n_chars=n_same)
