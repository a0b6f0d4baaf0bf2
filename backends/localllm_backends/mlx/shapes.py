"""What a call of a model gives, and how much memory a sequence takes, known before anything is
computed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import mlx.core as mx

from localllm_backends.contract import KvType
from localllm_backends.mlx.attention import Attention
from localllm_backends.mlx.sequence_cache import Layout, SequenceCache


@dataclass
class Shapes:
    """What a call of the model gives, known before anything is computed."""

    n_vocab: int
    leaves: list[list[Any]]
    slots: list[int]
    windows: list[int | None]
    kv_type: KvType = "f32"

    @property
    def kv_array(self) -> Any:
        """One array of keys, or None in a purely recurrent model."""
        return next((a[0] for a, n in zip(self.leaves, self.slots, strict=True) if n), None)

    @property
    def widths(self) -> set[int]:
        """The widths of all heads' keys and values."""
        kept = [arrays for arrays, n in zip(self.leaves, self.slots, strict=True) if n]
        return {int(a.shape[3]) for a in chain.from_iterable(kept)}

    @classmethod
    def of(cls, model: Any, layout: Layout) -> Shapes:
        """Build the graph of a two-token prompt and read its shapes."""
        line = SequenceCache(0, layout)
        logits = model(mx.zeros((1, 2), dtype=mx.int32), cache=line.batch.caches)
        leaves = [
            list(x.planes or ()) if isinstance(x, Attention) else list(x.cache) for x in line.leaves
        ]
        return cls(
            n_vocab=int(logits.shape[-1]),
            leaves=leaves,
            slots=[x.slots if isinstance(x, Attention) else 0 for x in line.leaves],
            windows=[x.rows.window if isinstance(x, Attention) else None for x in line.leaves],
        )

    def sizes(self) -> tuple[int, int]:
        """Bytes: of one token in the layers that keep every token, and of everything else one
        sequence holds."""
        token = line = 0
        for arrays, slots, window in zip(self.leaves, self.slots, self.windows, strict=True):
            held = sum(int(a.nbytes) for a in arrays if a is not None)
            if not slots:
                line += held
            elif window is None:
                token += held // slots
            else:
                line += held // slots * window
        return token, line
