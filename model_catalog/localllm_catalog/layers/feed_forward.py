"""Layers without a token mixer: a feed-forward only (Nemotron-H), or an encoder's layer without a
cache."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from localllm_catalog.architectures import NO_CACHE
from localllm_catalog.layers.mixer import Mixer, TableLayer, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer


@register
@dataclass(frozen=True, slots=True)
class FeedForward(Mixer):
    """A layer without memory."""

    word: ClassVar[str] = "none"
    precedence: ClassVar[int] = 60
    config_words: ClassVar[Collection[str]] = ("moe", "mlp", "-", "E")
    architectures: ClassVar[Collection[str]] = NO_CACHE

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        if layer.facts.arch in NO_CACHE or not layer.n_kv_heads:
            return cls()
        return None

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        return cls()
