"""The tensors of a quant that keep more bits than the quant's name says."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from localllm.quants.source import matrices, target_bits
from localllm_catalog import quants
from localllm_catalog.gguf import GgufHeader

_BLOCK = re.compile(r"blk\.\d+\.")


@dataclass(frozen=True, slots=True)
class LargerTensors:
    """Tensors of one kind that have a larger format than most of the quant.

    `name`: their name without the layer. `type`: their format. `count`: how many of them have it,
    of `of` in the file. `n_bytes`: their size together.
    """

    name: str
    type: str
    count: int
    of: int
    n_bytes: int

    @property
    def text(self) -> str:
        """ "ffn_down.weight in 12 of 24 layers: Q6_K"."""
        if self.of == 1:
            return f"{self.name}: {self.type}"
        return f"{self.name} in {self.count} of {self.of} layers: {self.type}"


def larger_tensors(header: GgufHeader, quant: str) -> list[LargerTensors]:
    """Return the kinds of matrices with more bits a weight than `quant`, the largest first."""
    quant_bits = target_bits(quant)
    counts: Counter[str] = Counter()
    n_larger: Counter[tuple[str, str]] = Counter()
    n_bytes_by_kind: Counter[tuple[str, str]] = Counter()
    for tensor in matrices(header):
        kind = _BLOCK.sub("", tensor.name)
        counts[kind] += 1
        if quants.GGUF_TYPES[tensor.type].bits > quant_bits > 0:
            n_larger[kind, tensor.type] += 1
            n_bytes_by_kind[kind, tensor.type] += tensor.n_bytes
    return [
        LargerTensors(kind, type_name, n_larger[kind, type_name], counts[kind], n_bytes)
        for (kind, type_name), n_bytes in n_bytes_by_kind.most_common()
    ]
