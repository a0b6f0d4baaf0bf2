"""TurboQuant (arXiv:2504.19874) as a storage format of keys and values, with mlx-vlm's codec.

A head's vector is divided by its norm and rotated. Each element is then the nearest of 2^bits
values. So a vector takes its bits in words of 32, and a norm in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm import turboquant

from localllm_backends.mlx.kv_format import KvFormat


class TurboFormat(KvFormat):
    """Keys and values with 2, 3 or 4 bits per element.

    Planes: for keys and then for values, the norms [.., 1] and the packed elements.
    """

    is_decoded = True

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._bits = bits
        self._dtype = mx.float32
        # A codec for each head width and use.
        self._codecs: dict[tuple[int, int], Any] = {}
        self._widths = (0, 0)

    def planes(self, keys: Any, values: Any) -> tuple[Any, ...]:
        self._dtype = keys.dtype
        self._widths = int(keys.shape[-1]), int(values.shape[-1])
        stored: list[Any] = []
        for which, vectors in enumerate((keys, values)):
            state = self._codec(which).quantize(vectors)
            stored += [state.norms[..., None], state.indices]
        return tuple(stored)

    def _codec(self, which: int) -> Any:
        """Return the codec of keys (0) or values (1), which have rotations of their own."""
        place = which, self._widths[which]
        if place not in self._codecs:
            seed = turboquant.DEFAULT_TURBOQUANT_SEED + which
            self._codecs[place] = turboquant._TurboQuantMSECodec(place[1], self._bits, seed)
        return self._codecs[place]

    def halves(self, planes: Sequence[Any]) -> tuple[Any, Any]:
        return tuple(planes[:2]), tuple(planes[2:])

    def fetched(self, planes: Sequence[Any]) -> tuple[Any, Any]:
        decoded = []
        for which, half in enumerate(self.halves(planes)):
            decoded.append(self._codec(which).dequantize(_state(half)).astype(self._dtype))
        return decoded[0], decoded[1]

    def scores(self, queries: Any, keys: Any) -> Any:
        found = self._codec(0).score(queries[..., None, :], _state(keys))
        return found[..., 0, :]

    def weighted(self, weights: Any, values: Any) -> Any:
        found = self._codec(1).weighted_sum(weights[..., None, :], _state(values))
        return found[..., 0, :]


def _state(half: Sequence[Any]) -> Any:
    norms, elements = half
    return turboquant.TurboQuantMSEState(norms[..., 0], elements)
