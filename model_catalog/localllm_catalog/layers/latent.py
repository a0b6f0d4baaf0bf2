"""Multi-head latent attention (MLA): one row for all heads, and no V cache."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.layers.mixer import CacheLayout, Mixer, TableLayer, Widths, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer
    from localllm_catalog.hf_config import Config


@register
@dataclass(frozen=True, slots=True)
class Latent(Mixer):
    """Latent attention. Each token keeps one row of `mla_rank` + `mla_rope_dim` elements.

    - `head_dim_k`, `head_dim_v`: expanded widths of one head, which are never in the cache.
    - `n_heads`: query heads (0 = the Model's).
    """

    mla_rank: int = 0
    mla_rope_dim: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    n_heads: int = 0

    word: ClassVar[str] = "mla"
    precedence: ClassVar[int] = 30

    @property
    def attends(self) -> bool:
        return True

    @property
    def heads_share_row(self) -> bool:
        return True

    @property
    def head_counts(self) -> tuple[int, ...]:
        return self.n_heads, 1

    def cells(self, layout: CacheLayout) -> int:
        return layout.n_ctx

    @property
    def row(self) -> tuple[int, int]:
        return self.mla_rank + self.mla_rope_dim, 0

    @property
    def quantised_separately(self) -> tuple[int, ...]:
        return self.mla_rank, self.mla_rope_dim

    def heads(self, n_heads: int) -> int:
        return self.n_heads or n_heads

    def flops(self, n_heads: int, depth: float, tokens_outside: float = 0.0) -> float:
        return 2 * self.heads(n_heads) * (2 * self.mla_rank + self.mla_rope_dim) * depth

    def output_width(self, n_heads: int) -> int:
        return self.heads(n_heads) * self.head_dim_v

    def is_fused(self, head_widths: Collection[int]) -> bool:
        return False

    def n_params(self, widths: Widths) -> int:
        hidden = widths.hidden
        n_heads = self.heads(widths.n_heads)
        queries = n_heads * self.head_dim_k
        query = hidden * queries
        if widths.q_rank:
            query = widths.q_rank * (hidden + queries)
        unrotated = self.head_dim_k - self.mla_rope_dim
        latent = hidden * (self.mla_rank + self.mla_rope_dim)
        expand = self.mla_rank * n_heads * (unrotated + self.head_dim_v)
        output = n_heads * self.head_dim_v * hidden
        return query + latent + expand + output + hidden

    def describe(self, cells: int, n_sequences: int) -> str:
        width = f"{self.mla_rank} + {self.mla_rope_dim} wide"
        return f"latent, {width}, {cells:,} cells"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        """Return None for files from before the *_mla keys. They hold the expanded keys and values,
        and llama.cpp caches those in full."""
        facts = layer.facts
        for key in ("attention.kv_lora_rank", "attention.key_length_mla"):
            if facts.value(key) is None:
                return None
        rank = facts.number("attention.kv_lora_rank")
        return cls(
            mla_rank=rank,
            mla_rope_dim=facts.number("rope.dimension_count", max(0, facts.head_dim_k - rank)),
            head_dim_k=facts.number("attention.key_length_mla"),
            head_dim_v=facts.number("attention.value_length_mla"),
            n_heads=layer.n_heads,
        )

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        sizes = layer.table["mla"]
        return cls(
            mla_rank=int(sizes["rank"]),
            mla_rope_dim=int(sizes["rope"]),
            head_dim_k=int(sizes["nope"]) + int(sizes["rope"]),
            head_dim_v=int(sizes["v"]),
        )

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        rank = config.number("kv_lora_rank", default=0)
        if not rank:
            return words
        table["mla"] = {
            "rank": rank,
            "rope": config.number("qk_rope_head_dim"),
            "nope": config.number("qk_nope_head_dim"),
            "v": config.number("v_head_dim"),
            "q_rank": config.number("q_lora_rank", default=0),
        }
        return ["mla" if word == "full" else word for word in words]

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Mixer | None:
        """Read a row of `layer_list`. It may state `n_kv_heads`, which is 1."""
        if row["kind"] != cls.word:
            return None
        return cls(
            **{key: value for key, value in row.items() if key not in ("kind", "n_kv_heads")}
        )
