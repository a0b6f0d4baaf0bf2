"""Sparse attention: an indexer's keys are stored with the KV and select the tokens to read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.layers import mixer
from localllm_catalog.layers.mixer import Mixer, TableLayer, Wrapper, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer

# Number of rows, as wide as an indexer's key, that it keeps for each token (on layers with an
# indexer by `attention.indexer.types`). From https://github.com/ggml-org/llama.cpp src/models/*.cpp
# (load_arch_hparams), read at b11434.
_ROWS_PER_TOKEN = {
    "qwen4exp": 1,
    "glm5-next": 3,
    "deepseek32": 1,
    "glm-dsa": 1,
    "hy_v4": 1,
    "minimax-m3": 1,
}
# Leading dense layers also have an indexer, except in these.
_NOT_ON_DENSE = frozenset({"minimax-m3"})


@register
@dataclass(frozen=True, slots=True)
class Indexed(Wrapper):
    """Attention as in `of`. Each token keeps `index_dim` more elements with the keys."""

    index_dim: int = 0

    key: ClassVar[str] = "index_dim"
    precedence: ClassVar[int] = 80
    architectures: ClassVar[Collection[str]] = tuple(_ROWS_PER_TOKEN)

    @property
    def row(self) -> tuple[int, int]:
        keys, values = self.of.row
        return keys + self.index_dim, values

    @property
    def index_width(self) -> int:
        return self.index_dim

    @property
    def value(self) -> int:
        return self.index_dim

    @classmethod
    def wrapping(cls, of: Mixer, value: Any) -> Mixer:
        return cls(of, int(value))

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        width = _index_elements(layer)
        if not width:
            return None
        of = mixer.from_gguf(layer, cls)
        if of.attends:
            return cls(of, width)
        return of

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        width = int(layer.own.get("index_dim", 0))
        if not width:
            return None
        return cls(mixer.from_table(layer, cls), width)


def _index_elements(layer: GgufLayer) -> int:
    """Return the elements per token that the indexer keeps on this layer: its key, and the gate and
    pooled key if keys are pooled.

    In llama.cpp, llama-memory-hybrid-idx.cpp keeps key, gate and pooled key side by side.
    llama-kv-cache-dsa.cpp and -msa.cpp keep a key.
    """
    facts = layer.facts
    if facts.arch not in _ROWS_PER_TOKEN:
        return 0
    if facts.arch in _NOT_ON_DENSE and layer.index < facts.number("leading_dense_block_count", 0):
        return 0
    indexer_types = facts.value("attention.indexer.types")
    if isinstance(indexer_types, tuple) and not any(indexer_types[layer.index : layer.index + 1]):
        return 0
    return _ROWS_PER_TOKEN[facts.arch] * facts.number("attention.indexer.key_length", 0)
