"""Layers for which llama.cpp gives each sequence its own cache, as long as the whole context
(DeepSeek V4)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from localllm_catalog.architectures import MAX_TOKENS
from localllm_catalog.layers.full import Full
from localllm_catalog.layers.indexed import Indexed
from localllm_catalog.layers.mixer import CacheLayout, Mixer, Wrapper, register
from localllm_catalog.layers.sliding import Sliding

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer

# Layers that keep a row for each 4th token select rows by an index.
_INDEXED_RATIO = 4
_WINDOW = 128


@register
@dataclass(frozen=True, slots=True)
class PerSequence(Wrapper):
    """A mixer like `of`, with a separate cache for each sequence."""

    key: ClassVar[str] = "per_sequence"
    precedence: ClassVar[int] = 40
    architectures: ClassVar[Collection[str]] = ("deepseek4",)

    def cells(self, layout: CacheLayout) -> int:
        if not layout.one_each:
            return self.of.cells(layout)
        return layout.n_sequences * self.of.cells(layout._replace(n_sequences=1))

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        """Read a layer of DeepSeek V4: one latent row, key and value at once, for each 4th or 128th
        token, or for the last tokens only.

        A layer with one row for several tokens counts each token's share of that row. Two parts are
        left out: the last 128 tokens, which the other layers keep too, and the rows to be
        compressed. For 43 layers they are 33 MiB a sequence (src/llama-kv-cache-dsv4.cpp).
        """
        facts = layer.facts
        if facts.arch not in cls.architectures:
            return None
        ratio = facts.per_layer("attention.compress_ratios", 0)[layer.index]
        row = facts.head_dim_k // max(1, ratio)
        # Weights that are missing if q, k and o are counted by the row's share.
        counted = facts.hidden * row * (layer.n_heads + 1)
        fields = {
            "n_kv_heads": 1,
            "head_dim_k": row,
            "n_heads": layer.n_heads,
            "mixer_params": max(0, layer.block.mixer_elements() - counted),
        }
        if ratio == _INDEXED_RATIO:
            width = facts.number("attention.indexer.key_length", 0)
            return Indexed(cls(Full(**fields, v_is_k=True)), width // ratio)
        if ratio:
            return cls(Full(**fields, v_is_k=True))
        window = facts.number("attention.sliding_window", _WINDOW, maximum=MAX_TOKENS)
        return cls(Sliding(**fields, v_is_k=True, window=window))
