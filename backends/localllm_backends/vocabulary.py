"""Tokens as text and bytes, whatever file says how: what our backends' vocabularies do alike. For
any thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from localllm_backends.contract import BackendFailure
from localllm_backends.control_text import ReadAnyway


class TokenBytes(ABC):
    """What a Backend says of its tokens (see `contract.Backend`).

    `controls`: how its control tokens are written; `added`: the other tokens that a tokenizer reads
    out of any text."""

    def __init__(self, n_vocab: int, controls: Iterable[str], added: Iterable[str]) -> None:
        self.n_vocab = n_vocab
        self.read_anyway = ReadAnyway(added)
        self.control_texts = (*controls, *self.read_anyway.texts)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @abstractmethod
    def _bytes(self, token: int, special: bool) -> bytes:
        """What a token of the vocabulary stands for."""

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.token_bytes(t, special=True) for t in tokens).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Cached, because text is made of few tokens."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self.n_vocab:
                raise BackendFailure(f"token {token} is outside the vocabulary of {self.n_vocab}")
            piece = self._pieces[token, special] = self._bytes(token, special)
        return piece

    def text(self, token: int | None) -> str:
        """How a token is written; "" for None."""
        if token is None:
            return ""
        return self.detokenize([token])
