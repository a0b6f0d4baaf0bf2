"""The memory layout of a model: a leaf for each layer's memory, and the storage format of keys and
values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList

from localllm_backends.contract import LoadError
from localllm_backends.mlx.attention import Attention, RowOffsets, phase_of
from localllm_backends.mlx.kv_format import KvFormat


@dataclass(frozen=True, slots=True)
class Leaf:
    """One layer's memory: keys and values of all tokens or of a `window`, or `n_arrays` recurrent
    arrays."""

    window: int | None = None
    n_arrays: int = 0

    @property
    def keeps_tokens(self) -> bool:
        return self.window is None and not self.n_arrays


class Layout:
    """A model's leaves, and the storage format of its keys and values.

    `slack`: tokens that can be taken back in a window.
    """

    def __init__(self, caches: Sequence[Any], form: KvFormat, slack: int) -> None:
        # For each layer the length of its list of caches; 0: one cache, not a list.
        self._grouped: list[int] = []
        self.leaves: list[Leaf] = []
        for cache in caches:
            if isinstance(cache, CacheList):
                self._grouped.append(len(cache.caches))
                self.leaves += [_leaf(each) for each in cache.caches]
            else:
                self._grouped.append(0)
                self.leaves.append(_leaf(cache))
        self.form = form
        self.slack = slack
        self.windows = sorted({leaf.window for leaf in self.leaves if leaf.window is not None})
        self.recurrent = any(leaf.n_arrays for leaf in self.leaves)
        # Whether forks share the memory of their prefix (split_attention.py).
        self.shares = False

    @property
    def plain(self) -> bool:
        """True if every leaf can be truncated to any length."""
        return not self.windows and not self.recurrent

    def build(self, rows: Mapping[int | None, RowOffsets]) -> tuple[list[Any], list[Any]]:
        """Return the caches as the model takes them, and the same leaves as a flat list.

        `rows`: the positions for each window.
        """
        flat: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if leaf.n_arrays:
                flat.append(ArraysCache(leaf.n_arrays))
            else:
                flat.append(Attention(self.form, rows[leaf.window], phase_of(i)))
                flat[i].number = i
        rest = iter(flat)
        caches: list[Any] = []
        for n in self._grouped:
            if n:
                caches.append(CacheList(*islice(rest, n)))
            else:
                caches.append(next(rest))
        return caches, flat


def _leaf(cache: Any) -> Leaf:
    """Return the leaf for mlx-lm's `cache` of a layer. Raises LoadError for an unknown type."""
    name = type(cache).__name__
    if name in ("KVCache", "ConcatenateKVCache"):
        return Leaf()
    if name == "RotatingKVCache" and not cache.keep:
        return Leaf(window=int(cache.max_size))
    if isinstance(cache, ArraysCache):
        return Leaf(n_arrays=len(cache.cache))
    raise LoadError(
        f"this model uses a cache of type {name}, which the MLX backend does not support"
    )


def arrays_of(leaves: Iterable[Any]) -> list[Any]:
    """Return every array of `leaves`. A step is finished when all of them are computed."""
    found: list[Any] = []
    for leaf in leaves:
        arrays = leaf.cache if isinstance(leaf, ArraysCache) else leaf.planes or ()
        found.extend(a for a in arrays if a is not None)
    return found
