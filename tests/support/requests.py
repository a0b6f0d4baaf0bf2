"""Requests in one line, as the engine's tests need them by the hundred."""

from __future__ import annotations

from typing import Any

from localllm.engine.messages import Generation, Request, Sampling

_OF_THE_REQUEST = frozenset(Request.__slots__) - {"generation"}


def request_for(
    id: str,  # noqa: A002 - the request's own word
    prompt: str | list[int],
    max_tokens: int | None = None,
    sampling: Sampling | None = None,
    **more: Any,
) -> Request:
    """A Request; `more` are fields of it and of its Generation."""
    own = {name: more.pop(name) for name in _OF_THE_REQUEST & set(more)}
    generation = Generation(sampling if sampling is not None else Sampling(), max_tokens, **more)
    return Request(id, prompt, generation, **own)
