"""Attention over the last tokens only, within a window."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.architectures import MAX_LAYERS, MAX_TOKENS
from localllm_catalog.layers.full import Full
from localllm_catalog.layers.mixer import CacheLayout, Mixer, TableLayer, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer
    from localllm_catalog.gguf_facts import Facts
    from localllm_catalog.hf_config import Config

# Architectures with sliding layers: (each nth layer is full, the first of n instead of the last is
# full, window if not stated). From https://github.com/ggml-org/llama.cpp src/models/*.cpp
# (load_arch_hparams), read at b11434.
_PERIODS: dict[str, tuple[int, bool, int]] = {
    "gemma2": (2, False, 4096),
    "gemma3": (6, False, 0),
    "gemma3n": (5, False, 0),
    "gpt-oss": (2, False, 0),
    "cohere2": (4, False, 0),
    "cohere2moe": (4, True, 0),
    "exaone4": (4, False, 4096),
    "exaone-moe": (4, False, 128),
    "llama4": (4, False, 8192),
    "olmo2": (4, False, 0),
    "mellum": (4, False, 0),
    "muse-glimmer": (4, False, 0),
    "plamo3": (8, False, 0),
    "laguna": (4, True, 0),
    "smallthinker": (4, True, 4096),
    "afmoe": (4, False, 0),
}
# These always state the pattern layer by layer.
_PATTERN_ALWAYS_STATED = frozenset(
    {
        "gemma4",
        "gemma4-assistant",
        "step35",
        "mimo2",
        "dots3note",
        "maple",
        "granite_swa",
        "spark2_5",
    },
)
_LLAMA4_WINDOW = 8192
# The number of layers of the only Exaone 4 with windows.
_EXAONE4_LAYERS = 64


@register
@dataclass(frozen=True, slots=True)
class Sliding(Full):
    """Attention over the last `window` tokens, with a cache of that many cells for each sequence."""

    window: int = 0

    word: ClassVar[str] = "sliding"
    precedence: ClassVar[int] = 20
    config_words: ClassVar[Collection[str]] = ("sliding_attention", "chunked_attention")
    architectures: ClassVar[Collection[str]] = _PATTERN_ALWAYS_STATED.union(_PERIODS)

    @property
    def is_bounded(self) -> bool:
        return True

    @property
    def reach(self) -> int:
        return self.window

    def cells(self, layout: CacheLayout) -> int:
        """Return each sequence's window plus one step's tokens, at most the context.

        llama.cpp: PAD(min(n_ctx, n_swa × n_seq_max + n_ubatch), 256) with a unified cache and
        `swa_full` off. mlx-lm's cache rotates within the window.
        """
        if not self.window:
            return layout.n_ctx
        n_cells = self.window * layout.n_sequences + layout.n_batch
        return min(layout.n_ctx, layout.padded(n_cells))

    def seen(self, depth: float, tokens_outside: float = 0.0) -> float:
        if not self.window:
            return depth
        return min(depth, self.window + tokens_outside)

    def describe(self, cells: int, n_sequences: int) -> str:
        return f"sliding {self.window:,}, {self.heads_in_words}, {cells:,} cells"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        facts = layer.facts
        window = _window(facts)
        if not window or not _is_sliding(facts, layer.index):
            return None
        return cls(
            n_kv_heads=layer.n_kv_heads,
            head_dim_k=facts.number("attention.key_length_swa", facts.head_dim_k),
            head_dim_v=facts.number("attention.value_length_swa", facts.head_dim_v),
            n_heads=layer.n_heads,
            v_is_k=layer.v_is_k,
            window=window,
        )

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        return cls(window=int(layer.own["window"]), **cls.stated_sizes(layer))

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        window = 0
        if config.get("use_sliding_window") is not False:
            window = config.number("sliding_window", "attention_chunk_size", default=0)
        table["sliding"] = {"window": window}
        if window:
            return words
        return ["full" if word == "sliding" else word for word in words]


def _window(facts: Facts) -> int:
    """Return the tokens that a sliding layer sees; 0 if the architecture has no such layers."""
    is_stated = isinstance(facts.value("attention.sliding_window_pattern"), tuple)
    if not (is_stated or facts.arch in _PERIODS or facts.arch in _PATTERN_ALWAYS_STATED):
        return 0
    _, _, default_window = _PERIODS.get(facts.arch, (0, False, 0))
    window = facts.number("attention.sliding_window", default_window, maximum=MAX_TOKENS)
    if facts.arch == "llama4" and window:
        return _LLAMA4_WINDOW
    return window


def _is_sliding(facts: Facts, index: int) -> bool:
    """Return whether llama.cpp gives this layer the windowed cache."""
    pattern = facts.value("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return index < len(pattern) and bool(pattern[index])
    if facts.arch not in _PERIODS:
        return False
    if facts.arch == "exaone4" and facts.n_layers != _EXAONE4_LAYERS:
        return False
    period, first_is_full, _ = _PERIODS[facts.arch]
    period = facts.number("attention.sliding_window_pattern", period, maximum=MAX_LAYERS)
    if not period:
        return True
    if first_is_full:
        return index % period != 0
    return index % period < period - 1
