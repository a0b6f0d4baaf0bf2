"""Attention that reads an earlier layer's KV and stores no KV itself (Gemma 3n, 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from localllm_catalog.layers import mixer
from localllm_catalog.layers.mixer import CacheLayout, Mixer, TableLayer, Widths, Wrapper, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer

# Layers of Gemma 3n with their own KV (llama.cpp src/models/gemma3n.cpp).
_GEMMA_3N_LAYERS = 20


@register
@dataclass(frozen=True, slots=True)
class Shared(Wrapper):
    """Attention as in `of`, with another layer's KV."""

    key: ClassVar[str] = "shares_kv"
    precedence: ClassVar[int] = 90

    def cells(self, layout: CacheLayout) -> int:
        return 0

    @property
    def elements(self) -> int:
        return 0

    @property
    def quantised_separately(self) -> tuple[int, ...]:
        return ()

    def n_params(self, widths: Widths) -> int:
        return self.of.n_params(widths) - self.of.kv_params(widths)

    def describe(self, cells: int, n_sequences: int) -> str:
        return "share another layer's KV"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        facts = layer.facts
        n_layers = facts.n_layers
        first = n_layers - facts.number("attention.shared_kv_layers", 0, maximum=n_layers)
        if facts.arch == "gemma3n":
            first = _GEMMA_3N_LAYERS
        if layer.index < first:
            return None
        return cls.if_attention(mixer.from_gguf(layer, cls))

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if not layer.shares_kv:
            return None
        return cls.if_attention(mixer.from_table(layer, cls))

    @classmethod
    def if_attention(cls, of: Mixer) -> Mixer:
        """Return `of` with another layer's KV, or `of` itself if it is not attention."""
        if of.attends:
            return cls(of)
        return of
