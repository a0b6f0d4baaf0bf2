"""Finds the tokens of a prompt's shared beginning: its system prompt and tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from localllm.engine.cache.tree import as_tokens, common_prefix
from localllm.engine.messages import Request


def tokenised(request: Request, tokenise: Callable[[str], list[int]]) -> tuple[Request, list[int]]:
    """The tokens of the text prompt of `request`, and the request with the length of its shared
    beginning in tokens.

    Text after the beginning may change the last tokens of it, so these are not part of it.
    """
    assert isinstance(request.prompt, str)
    tokens = tokenise(request.prompt)
    shared = request.shared
    if shared is None:
        return request, tokens
    beginning = tokenise(request.prompt[: shared.n_chars])
    n_tokens = common_prefix(as_tokens(tokens[: len(beginning)]), as_tokens(beginning))
    return replace(request, shared=replace(shared, n_tokens=n_tokens)), tokens
