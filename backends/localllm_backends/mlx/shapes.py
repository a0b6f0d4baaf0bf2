"""Shapes of a model's outputs and its memory per sequence, known without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx

from localllm_backends.contract import KvType
from localllm_backends.mlx.layout import Layout, arrays_of
from localllm_backends.mlx.sequence_cache import SequenceCache


@dataclass
class Shapes:
    """Shapes of the results of a model call.

    `n_vocab` logits per token, and the arrays of each leaf of `layout`.
    """

    n_vocab: int
    layout: Layout
    leaves: list[list[Any]]
    kv_type: KvType = "f32"

    @property
    def kv(self) -> list[Any]:
        """All arrays of keys and values; empty for a purely recurrent model."""
        pairs = zip(self.layout.leaves, self.leaves, strict=True)
        return list(chain.from_iterable(arrays for leaf, arrays in pairs if not leaf.n_arrays))

    @property
    def widths(self) -> set[int]:
        """The widths of keys and values over all heads."""
        return {int(a.shape[3]) for a in self.kv}

    @classmethod
    def of(cls, model: Callable[..., Any], layout: Layout) -> Shapes:
        """Build the graph of a two-token prompt and read its shapes."""
        seq = SequenceCache(0, layout)
        logits = model(mx.zeros((1, 2), dtype=mx.int32), cache=seq.batch.caches)
        return cls(int(logits.shape[-1]), layout, [arrays_of([leaf]) for leaf in seq.leaves])

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of one token in layers that keep every token, and all other bytes of a
        sequence."""
        token = seq = 0
        for leaf, arrays in zip(self.layout.leaves, self.leaves, strict=True):
            held_bytes = sum(int(a.nbytes) for a in arrays)
            if leaf.n_arrays:
                seq += held_bytes
            elif leaf.window is None:
                token += held_bytes // int(arrays[0].shape[2])
            else:
                seq += held_bytes // int(arrays[0].shape[2]) * leaf.window
        return token, seq
