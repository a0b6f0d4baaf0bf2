"""How many tokens a text has that has far too many, found by a part of it."""

from __future__ import annotations

from localllm_backends.contract import Backend
from localllm_backends.control_text import without_marks

# Text has three to five bytes a token, code with much space in it up to this many.
_BYTES_A_TOKEN = 8
_PIECE_CHARS = 2**14
# So much is read whole in a moment, for its exact count.
_EXACT_CHARS = 2**16


def estimated_tokens(backend: Backend, text: str, most: int) -> int | None:
    """About how many tokens a text has that has more than `most`, None where it may have fewer. No
    more of it is read than shows that."""
    text = without_marks(text)
    may_fit = len(text.encode("utf-8", "replace")) <= _BYTES_A_TOKEN * most
    if may_fit or len(text) <= _EXACT_CHARS:
        return None
    n_tokens = 0
    for end in range(_PIECE_CHARS, len(text) + _PIECE_CHARS, _PIECE_CHARS):
        n_tokens += len(backend.tokenize(text[end - _PIECE_CHARS : end]))
        # Read in pieces it has some more than in one.
        if n_tokens > most + most // 8 + _PIECE_CHARS // 64:
            return n_tokens * len(text) // min(end, len(text))
    return None
