"""The storage format of keys and values, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


class KvFormat:
    """Storage format of keys and values: unchanged, or quantised in groups of `bits` per element."""

    # Whether a model gets decoded keys and values. Otherwise it gets those that are stored.
    is_decoded = False

    def __init__(self, bits: int = 0, group_size: int = 64) -> None:
        self.bits = bits
        self.group_size = group_size

    def planes(self, keys: Any, values: Any) -> tuple[Any, ...]:
        if not self.bits:
            return keys, values
        of_keys = mx.quantize(keys, group_size=self.group_size, bits=self.bits)
        of_values = mx.quantize(values, group_size=self.group_size, bits=self.bits)
        return (*of_keys, *of_values)

    def halves(self, planes: Sequence[Any]) -> tuple[Any, Any]:
        """Return planes as the (keys, values) of attention."""
        if self.bits:
            return tuple(planes[:3]), tuple(planes[3:])
        return planes[0], planes[1]

    def fetched(self, planes: Sequence[Any]) -> tuple[Any, Any]:
        """Return the keys and values that a model gets from its cache."""
        return self.halves(planes)

    def scores(self, queries: Any, keys: Any) -> Any:
        """Return the products of `queries` [.., n, width] and `keys` in float32: [.., n, slots]."""
        if self.bits:
            codes, scales, biases = keys
            return mx.quantized_matmul(
                queries, codes, scales, biases, True, group_size=self.group_size, bits=self.bits
            )
        return queries @ keys.astype(mx.float32).swapaxes(-1, -2)

    def weighted(self, weights: Any, values: Any) -> Any:
        """Return the sums of `values` by `weights` [.., n, slots] in float32: [.., n, width]."""
        if self.bits:
            codes, scales, biases = values
            return mx.quantized_matmul(
                weights, codes, scales, biases, False, group_size=self.group_size, bits=self.bits
            )
        return weights @ values.astype(mx.float32)
