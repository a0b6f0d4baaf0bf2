"""The tokens in a client's own prompt (its first request with tools), by the starter model."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.models import smollm2


@cache
def _vocabulary() -> Any:
    import llama_cpp

    return llama_cpp.Llama(str(smollm2()), vocab_only=True, verbose=False)


def tokens_of(prompt: str) -> int:
    """Return the number of tokens of `prompt`."""
    if not prompt:
        return 0
    return len(_vocabulary().tokenize(prompt.encode(), add_bos=False, special=True))
