"""Attention over all earlier tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.layers.mixer import CacheLayout, Mixer, TableLayer, Widths, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer
    from localllm_catalog.hf_config import Config


@register
@dataclass(frozen=True, slots=True)
class Full(Mixer):
    """Full attention. Each token keeps `n_kv_heads` × (`head_dim_k` + `head_dim_v`) elements.

    - `n_heads`: query heads (0 = the Model's).
    - `mixer_params`: weights in addition to those of q, k, v and o.
    - `v_is_k`: values reuse the key projection; the cache still holds both.
    """

    n_kv_heads: int = 0
    head_dim_k: int = 0
    head_dim_v: int = 0
    n_heads: int = 0
    mixer_params: int = 0
    v_is_k: bool = False

    word: ClassVar[str] = "full"
    precedence: ClassVar[int] = 10
    config_words: ClassVar[Collection[str]] = (
        "full_attention",
        "attention",
        "global_attention",
        "*",
    )
    # Architectures with attention on all layers and an ordinary cache. From llama.cpp's
    # src/models/*.cpp (load_arch_hparams) at b11434.
    architectures: ClassVar[Collection[str]] = frozenset(
        {"llama", "mistral3", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "qwen3vl",
         "qwen3vlmoe", "phi2", "phi3", "phimoe", "gemma", "granite", "granitemoe", "smollm3",
         "glm4", "glm4moe", "chatglm", "deepseek", "deepseek2", "mistral4", "seed_oss",
         "starcoder", "starcoder2", "minimax-m2", "ernie4_5", "ernie4_5-moe", "hunyuan-dense",
         "hunyuan-moe", "command-r", "olmoe", "openelm", "deci", "exaone", "stablelm",
         "internlm2", "falcon", "gpt2", "gptneox", "bloom", "mpt", "baichuan", "dbrx", "grok",
         "minicpm", "minicpm3", "nemotron", "apertus", "arcee", "dots1", "bailingmoe",
         "bailingmoe2", "plamo", "refact", "orion", "xverse", "jais", "codeshell", "gptj",
         "qwen", "olmo", "arctic", "deepseek2-ocr", "bitnet", "jais2", "graniteswitch",
         "chameleon", "plm", "hunyuan_vl", "hy_v3", "grovemoe", "hrm_text", "cogvlm",
         "pangu-embedded", "paddleocr", "llama-embed", "maincoder", "talkie"},
    )  # fmt: skip

    @property
    def attends(self) -> bool:
        return True

    @property
    def head_counts(self) -> tuple[int, ...]:
        return self.n_heads, self.n_kv_heads

    def cells(self, layout: CacheLayout) -> int:
        return layout.n_ctx

    @property
    def row(self) -> tuple[int, int]:
        return self.n_kv_heads * self.head_dim_k, self.n_kv_heads * self.head_dim_v

    @property
    def quantised_separately(self) -> tuple[int, ...]:
        return self.head_dim_k, self.head_dim_v

    def heads(self, n_heads: int) -> int:
        return self.n_heads or n_heads

    def flops(self, n_heads: int, depth: float, tokens_outside: float = 0.0) -> float:
        widths = self.head_dim_k + self.head_dim_v
        return 2 * self.heads(n_heads) * widths * self.seen(depth, tokens_outside)

    def output_width(self, n_heads: int) -> int:
        return self.heads(n_heads) * self.head_dim_v

    def is_fused(self, head_widths: Collection[int]) -> bool:
        return self.head_dim_k == self.head_dim_v and self.head_dim_k in head_widths

    def n_params(self, widths: Widths) -> int:
        hidden = widths.hidden
        n_heads = self.heads(widths.n_heads)
        query = hidden * n_heads * self.head_dim_k
        if widths.is_gated:
            query *= 2
        output = n_heads * self.head_dim_v * hidden
        return query + self.kv_params(widths) + output + self.mixer_params + hidden

    def kv_params(self, widths: Widths) -> int:
        keys = widths.hidden * self.n_kv_heads * self.head_dim_k
        if self.v_is_k:
            return keys
        return keys + widths.hidden * self.n_kv_heads * self.head_dim_v

    def describe(self, cells: int, n_sequences: int) -> str:
        return f"full, {self.heads_in_words}, {cells:,} cells"

    @property
    def heads_in_words(self) -> str:
        """Its cached heads and their widths, in words."""
        return f"{self.n_kv_heads} heads × ({self.head_dim_k} + {self.head_dim_v})"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        return cls(
            n_kv_heads=layer.n_kv_heads,
            head_dim_k=layer.facts.head_dim_k,
            head_dim_v=layer.facts.head_dim_v,
            n_heads=layer.n_heads,
            v_is_k=layer.v_is_k,
        )

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        return cls(**cls.stated_sizes(layer))

    @staticmethod
    def stated_sizes(layer: TableLayer) -> dict[str, Any]:
        """Return the fields that a family file states, by name."""
        own = layer.own
        table = layer.table
        head_dim = int(own.get("head_dim", table["head_dim"]))
        # Per-layer embeddings (Gemma 3n, 4): an input gate, a projection back, and this layer's
        # share of the model's projection.
        per_layer = 3 * int(table["hidden"]) * int(table.get("per_layer_embedding", 0))
        return {
            "n_kv_heads": int(own.get("kv_heads", table["kv_heads"])),
            "head_dim_k": head_dim,
            "head_dim_v": head_dim,
            "n_heads": int(own.get("heads", 0)),
            "mixer_params": per_layer,
            "v_is_k": bool(own.get("v_is_k", False)),
        }

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        if config.type.startswith("gemma4"):
            kv_heads = table["kv_heads"]
            table["full"] = {
                "head_dim": config.number("global_head_dim", default=table["head_dim"]),
                "kv_heads": config.number("num_global_key_value_heads", default=kv_heads),
                "v_is_k": config.get("attention_k_eq_v") is True,
            }
        return words

    def overridden(self, config: Config) -> Mixer:
        head_dim = config.number("head_dim", default=self.head_dim_k)
        n_kv_heads = config.number("num_key_value_heads", default=self.n_kv_heads)
        return replace(self, n_kv_heads=n_kv_heads, head_dim_k=head_dim, head_dim_v=head_dim)
