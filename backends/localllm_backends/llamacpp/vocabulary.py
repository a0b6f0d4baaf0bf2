"""A loaded model's vocabulary: text to token ids and back. Pure, so that any thread may ask."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from localllm_backends.contract import BackendFailure
from localllm_backends.llamacpp.native import token_piece


class Vocabulary:
    """What a Backend says of its tokens (see `contract.Backend`)."""

    def __init__(self, llama: Any, model: Any) -> None:
        self._llama = llama
        self._vocab = llama.llama_model_get_vocab(model)
        self._n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def tokenize(self, text: str, *, special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; BOS first if `add_bos` and the model wants one."""
        data = text.encode("utf-8", "replace")
        capacity = len(data) + 8
        buffer = (self._llama.llama_token * capacity)()
        n = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, capacity, add_bos, special)
        if n < 0:
            buffer = (self._llama.llama_token * -n)()
            n = self._llama.llama_tokenize(self._vocab, data, len(data), buffer, -n, add_bos, special)
        return list(buffer[:n])

    def detokenize(self, tokens: Seq[int]) -> str:
        """Text of `tokens`."""
        return b"".join(self.token_bytes(t, special=True) for t in tokens).decode("utf-8", "replace")

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; cached, because text is made of few tokens."""
        piece = self._pieces.get((token, special))
        if piece is None:
            if not 0 <= token < self._n_vocab:
                raise BackendFailure(f"token {token} is outside the vocabulary of {self._n_vocab}")
            piece = token_piece(self._llama, self._vocab, token, special=special)
            self._pieces[token, special] = piece
        return piece

    def is_control(self, token: int) -> bool:
        """True for the vocabulary's control tokens."""
        return bool(self._llama.llama_vocab_is_control(self._vocab, token))
