"""What KV types cost in precision on the loaded weights: the same text read with each and with f16,
row by row, in small contexts over the same weights, a few tokens at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import BackendFailure, KvFidelity, KvType, LoadError, LoadSpec
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


def compared(
    llama: Any,
    model: Any,
    spec: LoadSpec,
    pairs: Sequence[tuple[str, str]],
    tokens: Sequence[int],
) -> tuple[KvFidelity, ...]:
    """Pairs of KV types against f16 over `tokens`; one that this model can't have is left out.
    BackendFailure for a type that llama.cpp does not know, and where a text can't be read."""
    unknown = next((kind for kind in chain.from_iterable(pairs) if kind not in GGML_TYPES), None)
    if unknown is not None:
        raise BackendFailure(
            f"unknown KV cache type {unknown!r}: llama.cpp knows {', '.join(GGML_TYPES)}"
        )
    small = replace(
        spec,
        n_ctx=len(tokens),
        n_batch=PIECE_TOKENS,
        n_outputs=PIECE_TOKENS,
        n_rewind=0,
        mtp=False,
        drafter="",
    )
    reader = _PieceReader(llama, model)
    with ExitStack() as opened:
        exact = opened.enter_context(_context(llama, model, small, "f16", "f16"))
        found: list[_Pair] = []
        for k, v in pairs:
            try:
                context = opened.enter_context(_context(llama, model, small, k, v))
            except LoadError:  # no rows of whole blocks, or no kernel
                continue
            found.append(_Pair(k, v, context))
        for at in range(0, len(tokens), PIECE_TOKENS):
            piece = list(tokens[at : at + PIECE_TOKENS])
            rows = reader.log_probabilities(exact, at, piece)
            for pair in found:
                pair.add(rows, reader.log_probabilities(pair.context, at, piece))
    return tuple(pair.result(len(tokens)) for pair in found)


@contextmanager
def _context(llama: Any, model: Any, spec: LoadSpec, k: str, v: str) -> Iterator[Any]:
    typed = replace(spec, kv_type_k=cast("KvType", k), kv_type_v=cast("KvType", v))
    context = new_context(model, typed, n_seq_max=1)
    try:
        yield context
    finally:
        llama.llama_free(context)


class _PieceReader:
    """Reads pieces of a text in any context over one model."""

    def __init__(self, llama: Any, model: Any) -> None:
        self._llama, self._batch = llama, Batch(llama, PIECE_TOKENS)
        self._n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)))

    def log_probabilities(self, context: Any, at: int, piece: list[int]) -> Rows:
        """Of each token behind those of `piece`, which stands at `at`: [tokens, vocabulary]."""
        self._batch.clear()
        self._batch.add(0, at, piece, len(piece))
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
