"""What KV types cost in precision on the loaded weights: the same text read with each and with f16,
row by row.

Small contexts over the same weights, a few tokens at a time, so that whoever asks can stop between
two pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import (
    BackendFailure,
    KvComparison,
    KvFidelity,
    KvType,
    LoadError,
    LoadSpec,
)
from localllm_backends.llamacpp.batch import Batch
from localllm_backends.llamacpp.context import new_context
from localllm_backends.llamacpp.native import GGML_TYPES

# Rows of logits at once: 16 of a vocabulary of 262,144 are 17 MB in each context.
PIECE_TOKENS = 16
# Logits that a model sets to minus infinity, as a number that can be reckoned with.
_LEAST = -1e30

Rows = NDArray[np.float64]


@dataclass
class _Pair:
    """One pair of types, and what was seen of it so far."""

    k: str
    v: str
    context: Any
    divergence: float = 0.0
    worst: float = 0.0
    flips: int = 0

    def add(self, exact: Rows, near: Rows) -> None:
        divergence = (np.exp(exact) * (exact - near)).sum(axis=1)
        self.divergence += float(divergence.sum())
        self.worst = max(self.worst, float(divergence.max()))
        self.flips += int((exact.argmax(axis=1) != near.argmax(axis=1)).sum())

    def result(self, n: int) -> KvFidelity:
        return KvFidelity(
            self.k, self.v, n, max(0.0, self.divergence / n), self.worst, self.flips / n
        )


class KvTypeComparison(KvComparison):
    """Pairs of KV types against f16 over `tokens`."""

    def __init__(
        self,
        llama: Any,
        model: Any,
        spec: LoadSpec,
        pairs: Sequence[tuple[str, str]],
        tokens: Sequence[int],
    ) -> None:
        unknown = next(
            (kind for kind in chain.from_iterable(pairs) if kind not in GGML_TYPES), None
        )
        if unknown is not None:
            raise BackendFailure(
                f"unknown KV cache type {unknown!r}: llama.cpp knows {', '.join(GGML_TYPES)}"
            )
        self._llama, self._model, self._tokens, self._at = llama, model, list(tokens), 0
        self._batch = Batch(llama, PIECE_TOKENS)
        self._n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))
        self._spec = replace(
            spec,
            n_ctx=len(self._tokens),
            n_batch=PIECE_TOKENS,
            n_outputs=PIECE_TOKENS,
            n_rewind=0,
            mtp=False,
            drafter="",
        )
        # The next piece as f16 has it, and the pair that reads it next.
        self._rows: Rows | None = None
        self._next = 0
        self._exact = self._context("f16", "f16")
        self._pairs: list[_Pair] = []
        try:
            for k, v in pairs:
                try:
                    self._pairs.append(_Pair(k, v, self._context(k, v)))
                except LoadError:  # no rows of whole blocks, or no kernel
                    continue
        except BackendFailure:
            self.close()
            raise

    def run(self) -> tuple[KvFidelity, ...] | None:
        """Read the next piece in one context; one result for each pair once the text is read in
        all, else None."""
        piece = self._tokens[self._at : self._at + PIECE_TOKENS]
        if self._rows is None:
            self._rows = self._log_probabilities(self._exact, piece)
            self._next = 0
        else:
            pair = self._pairs[self._next]
            pair.add(self._rows, self._log_probabilities(pair.context, piece))
            self._next += 1
        if self._next < len(self._pairs):
            return None
        self._rows = None
        self._at += len(piece)
        if self._at < len(self._tokens):
            return None
        return tuple(pair.result(self._at) for pair in self._pairs)

    def close(self) -> None:
        while self._pairs:
            self._llama.llama_free(self._pairs.pop().context)
        if self._exact is not None:
            self._llama.llama_free(self._exact)
            self._exact = None

    def _context(self, k: str, v: str) -> Any:
        spec = replace(self._spec, kv_type_k=cast("KvType", k), kv_type_v=cast("KvType", v))
        return new_context(self._model, spec, n_seq_max=1)

    def _log_probabilities(self, context: Any, piece: list[int]) -> Rows:
        self._batch.clear()
        self._batch.add(0, self._at, piece, len(piece))
        code = self._llama.llama_decode(context, self._batch.native)
        if code:
            raise BackendFailure(
                f"llama_decode failed with code {code} while KV types were compared"
            )
        rows = np.ctypeslib.as_array(
            self._llama.llama_get_logits(context), (len(piece), self._n_vocab)
        )
        values = np.maximum(rows.astype(np.float64), _LEAST)
        values -= values.max(axis=1, keepdims=True)
        normal: Rows = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
        return normal
