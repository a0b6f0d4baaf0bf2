"""Estimate the token count of a text that is far too long, from a part of it."""

from __future__ import annotations

from localllm_backends.contract import Backend
from localllm_backends.control_text import without_marks

# Text has 3 to 5 bytes per token; code with much whitespace has up to 8.
_BYTES_A_TOKEN = 8
_PIECE_CHARS = 2**14
# A text of this size is tokenized quickly, so its exact count is used.
_EXACT_CHARS = 2**16


def estimated_tokens(backend: Backend, text: str, max_tokens: int) -> int | None:
    """Return the approximate token count of a text with more than `max_tokens` tokens.

    Returns None if the text may have fewer. Reads no more of the text than it needs to decide.
    """
    text = without_marks(text)
    may_fit = len(text.encode("utf-8", "replace")) <= _BYTES_A_TOKEN * max_tokens
    if may_fit or len(text) <= _EXACT_CHARS:
        return None
    n_tokens = 0
    for end in range(_PIECE_CHARS, len(text) + _PIECE_CHARS, _PIECE_CHARS):
        n_tokens += len(backend.tokenize(text[end - _PIECE_CHARS : end]))
        # A text that is tokenized in pieces has a few more tokens.
        if n_tokens > max_tokens + max_tokens // 8 + _PIECE_CHARS // 64:
            return n_tokens * len(text) // min(end, len(text))
    return None
