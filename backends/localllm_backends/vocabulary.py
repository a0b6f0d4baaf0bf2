"""Tokens as text and bytes: the part that the vocabularies of all our backends share.

It may be used from any thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from localllm_backends.contract import BackendFailure
from localllm_backends.control_text import AlwaysParsedTexts


class TokenBytes(ABC):
    """The token methods of a Backend (see `contract.Backend`).

    `controls`: how the control tokens are written. `added`: other tokens that the tokenizer finds
    in any text.
    """

    def __init__(self, n_vocab: int, controls: Iterable[str], added: Iterable[str]) -> None:
        self.n_vocab = n_vocab
        self.always_parsed = AlwaysParsedTexts(added)
        self.control_texts = (*controls, *self.always_parsed.texts)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @abstractmethod
    def _bytes(self, token: int, special: bool) -> bytes:
        """Return the bytes of a token in the vocabulary."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.token_bytes(t, special=True) for t in tokens).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token. They are cached, because a text uses few different
        tokens."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self.n_vocab:
                raise BackendFailure(f"token {token} is outside the vocabulary of {self.n_vocab}")
            piece = self._pieces[token, special] = self._bytes(token, special)
        return piece

    def text(self, token: int | None) -> str:
        """Return how a token is written; "" for None."""
        if token is None:
            return ""
        return self.detokenize([token])
