"""The contract of an embedder: what a backend offers whose models turn texts into vectors, or score them, instead of
writing more text.

A BackendType that can load such files has `load_embedder(path, n_ctx, n_threads, n_gpu_layers, on_progress)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import ModelInfo


class Embedder(Protocol):
    """One loaded embedding model, or a reranker (`pooling` "rank"), whose rows are scores. Not thread-safe: its owner
    calls everything."""

    info: ModelInfo
    n_embd: int
    pooling: str

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text` with the marks the model wants around it (CLS, SEP, EOS)."""
        ...

    def tokenize_pair(self, query: str, document: str) -> list[int]:
        """Token ids of what a reranker reads: the query and the document, with the marks it wants around them."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""
        ...

    def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """One row of `n_embd` numbers per input, of length 1; a reranker's are its scores as they are. Raises
        BackendFailure; an input must have between 1 and `info.n_ctx` tokens."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


class LoadsEmbedders(Protocol):
    """The part of a BackendType that embedding models need."""

    def load_embedder(
        self,
        path: str,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        on_progress: Callable[[float], None] | None = None,
    ) -> Embedder:
        """Load the model at `path`; raises LoadError, also for one that makes neither embeddings nor scores."""
        ...
