"""Recurrent layers: a state of fixed size for each sequence, at any length."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from localllm_catalog.errors import BadCatalogError
from localllm_catalog.layers.mixer import Mixer, TableLayer, Widths, register

if TYPE_CHECKING:
    from localllm_catalog.gguf_blocks import GgufLayer
    from localllm_catalog.gguf_facts import Facts
    from localllm_catalog.hf_config import Config

# The recurrent layers of an architecture: all except each nth, those without heads, those without
# heads and feed-forward, or all. From https://github.com/ggml-org/llama.cpp src/models/*.cpp
# (load_arch_hparams), read at b11434.
_FULL_EVERY = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "qwen4exp": 4, "minimax-01": 8}
_WITHOUT_HEADS = frozenset(
    {
        "granitehybrid",
        "jamba",
        "plamo2",
        "lfm2",
        "lfm2moe",
        "kimi-linear",
        "kimi-k3",
        "bailingmoe3",
        "glm5-next",
    },
)
_SPLIT_BLOCKS = frozenset({"nemotron_h", "nemotron_h_moe"})
_WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})


@register
@dataclass(frozen=True, slots=True)
class Recurrent(Mixer):
    """A recurrent layer. Each sequence keeps `state_elements` float32 numbers. `mixer_params` are
    the mixer's weights."""

    state_elements: int = 0
    mixer_params: int = 0

    word: ClassVar[str] = "recurrent"
    precedence: ClassVar[int] = 70
    config_words: ClassVar[Collection[str]] = ("linear_attention", "conv", "mamba", "M")
    architectures: ClassVar[Collection[str]] = (
        _WITHOUT_HEADS | _SPLIT_BLOCKS | _WITHOUT_ATTENTION
    ).union(_FULL_EVERY)

    @property
    def is_recurrent(self) -> bool:
        return True

    @property
    def state_floats(self) -> int:
        return self.state_elements

    def n_params(self, widths: Widths) -> int:
        return self.mixer_params + widths.hidden

    def describe(self, cells: int, n_sequences: int) -> str:
        state = f"{self.state_elements:,} floats of state"
        return f"recurrent, {state} × {n_sequences} sequences"

    @classmethod
    def from_gguf(cls, layer: GgufLayer) -> Mixer | None:
        if not _is_recurrent(layer):
            return None
        facts = layer.facts
        return cls(
            state_elements=header_state(facts) + _ngram_state(facts, layer.index),
            mixer_params=layer.block.mixer_elements(),
        )

    @classmethod
    def from_table(cls, layer: TableLayer) -> Mixer | None:
        if layer.word != cls.word:
            return None
        state, weights = stated_sizes(layer.table["recurrent"], int(layer.table["hidden"]))
        return cls(state_elements=state, mixer_params=weights)

    @classmethod
    def read_config(cls, words: list[str], config: Config, table: dict[str, Any]) -> list[str]:
        if cls.word in words:
            table["recurrent"] = _config_sizes(config, table)
        return words


# --- GGUF headers ---------------------------------------------------------------------------------


def _is_recurrent(layer: GgufLayer) -> bool:
    """Return whether this layer keeps a fixed state instead of a growing cache."""
    facts = layer.facts
    stated_layers = facts.value("attention.recurrent_layers")
    if isinstance(stated_layers, tuple):
        return layer.index < len(stated_layers) and bool(stated_layers[layer.index])
    if facts.arch in _WITHOUT_ATTENTION:
        return True
    if facts.arch in _FULL_EVERY:
        period = facts.number("full_attention_interval", _FULL_EVERY[facts.arch], minimum=1)
        return (layer.index + 1) % period != 0
    if layer.n_kv_heads:
        return False
    if facts.arch in _SPLIT_BLOCKS:
        return facts.ffn[layer.index] == 0
    return facts.arch in _WITHOUT_HEADS


def header_state(facts: Facts) -> int:
    """Return the float32 elements that one recurrent layer keeps for each sequence
    (llama-hparams.cpp, n_embd_r + n_embd_s)."""
    n_heads = max(facts.heads, default=0)
    wkv_head_size = facts.number("wkv.head_size", 0)
    if wkv_head_size:
        return facts.hidden * (facts.number("token_shift_count", 2) + wkv_head_size)
    conv_length = facts.number("shortconv.l_cache", 0)
    if conv_length:
        return facts.hidden * (conv_length - 1)
    conv_kernel = facts.number("ssm.conv_kernel", 0)
    kda_head_dim = facts.number("kda.head_dim", 0)
    if kda_head_dim:
        return (
            3 * ((conv_kernel or 4) - 1) * n_heads * kda_head_dim
            + kda_head_dim * kda_head_dim * n_heads
        )
    if facts.arch == "minimax-01":
        return facts.head_dim_k * facts.head_dim_k * n_heads
    inner_size = facts.number("ssm.inner_size", 0)
    state_size = facts.number("ssm.state_size", 0)
    n_groups = facts.number("ssm.group_count", 0)
    return (
        max(0, conv_kernel - 1) * (inner_size + 2 * n_groups * state_size) + state_size * inner_size
    )


def _ngram_state(facts: Facts, index: int) -> int:
    """Return the extra elements of a layer that reads n-gram tables: the history of its dilated
    convolution (qwen4exp)."""
    layers = facts.value("ple.layers")
    if not isinstance(layers, tuple) or index not in layers:
        return 0
    rows = max(0, facts.number("ple.conv_kernel", 0) - 1) * facts.number("ple.ngram_size", 0)
    return rows * facts.hidden * facts.number("hyper_connection.count", 1)


# --- family files ---------------------------------------------------------------------------------


def stated_sizes(facts: Mapping[str, Any], hidden: int) -> tuple[int, int]:
    """Return (state elements, mixer weights) of one recurrent layer of `kind` gated_delta, mamba2,
    mamba, wkv, short_conv or kda.

    State: https://github.com/ggml-org/llama.cpp src/llama-hparams.cpp (n_embd_r + n_embd_s).
    Weights: the layers of https://github.com/ml-explore/mlx-lm
    models/{qwen3_next,nemotron_h,lfm2,bailing_moe_v3}.py, 0.32.2.
    """
    kind = facts["kind"]
    if kind not in _SIZES:
        raise BadCatalogError(f"{kind!r} is not a recurrent kind", f"known: {', '.join(_SIZES)}")
    return _SIZES[kind](facts, hidden, int(facts["conv"]))


def _short_conv(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    return hidden * (conv - 1), 4 * hidden * hidden + hidden * conv


def _wkv(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    weights = 4 * hidden * hidden + 2 * hidden * int(facts["ranks"])
    return hidden * int(facts["head"]) + 2 * hidden, weights


def _gated_delta(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    state = int(facts["state"])
    value_heads = int(facts["value_heads"])
    values = value_heads * state
    keys = int(facts["key_heads"]) * state
    channels = values + 2 * keys
    project = hidden * (channels + values + 2 * value_heads)
    weights = project + channels * conv + values * hidden + 2 * value_heads + state
    return (conv - 1) * channels + state * values, weights


def _mamba2(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    inner = int(facts["inner"])
    state = int(facts["state"])
    heads = int(facts["heads"])
    channels = inner + 2 * int(facts["groups"]) * state
    project = hidden * (inner + channels + heads)
    weights = project + channels * (conv + 1) + inner * hidden + inner + 3 * heads
    return (conv - 1) * channels + state * inner, weights


def _mamba(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    inner = int(facts["inner"])
    state = int(facts["state"])
    steps = 2 * int(facts["rank"]) + 2 * state + 1
    weights = 3 * hidden * inner + inner * (conv + 1) + inner * steps + inner * (state + 1)
    return (conv - 1) * inner + state * inner, weights


def _kda(facts: Mapping[str, Any], hidden: int, conv: int) -> tuple[int, int]:
    heads = int(facts["heads"])
    size = int(facts["state"])
    width = heads * size
    # The q, k, v and output projections are hidden × width. So are the forget gate and the output
    # gate, unless they have a rank.
    gates = 2 * hidden * width
    rank = int(facts.get("gate_rank", 0))
    if rank:
        gates = 2 * (hidden + width) * rank
    weights = 4 * hidden * width + gates + 3 * width * conv + hidden * heads + heads + width
    return 3 * (conv - 1) * width + size * width, weights


_SIZES = {
    "gated_delta": _gated_delta,
    "mamba2": _mamba2,
    "mamba": _mamba,
    "wkv": _wkv,
    "short_conv": _short_conv,
    "kda": _kda,
}


# --- config.json ----------------------------------------------------------------------------------


def _config_sizes(config: Config, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a config states, in the form of a family file."""
    if config.get("linear_num_value_heads") is not None:
        return {
            "kind": "gated_delta",
            "key_heads": config.number("linear_num_key_heads"),
            "value_heads": config.number("linear_num_value_heads"),
            "state": config.number("linear_key_head_dim", default=128),
            "conv": config.number("linear_conv_kernel_dim", default=4),
        }
    if config.get("conv_L_cache") is not None:
        return {"kind": "short_conv", "conv": config.number("conv_L_cache")}
    if config.type == "rwkv7":
        ranks = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
        return {
            "kind": "wkv",
            "conv": 0,
            "head": table["head_dim"],
            "ranks": sum(config.number(rank, default=64) for rank in ranks),
        }
    if config.type in ("mamba", "falcon_mamba"):
        rank = -(-table["hidden"] // 16)
        if config.get("time_step_rank") != "auto":
            rank = config.number("time_step_rank", default=rank)
        return {
            "kind": "mamba",
            "inner": config.number("intermediate_size", "d_inner", default=2 * table["hidden"]),
            "state": config.number("state_size", "d_state"),
            "rank": rank,
            "conv": config.number("conv_kernel", "d_conv"),
        }
    heads = config.number("mamba_num_heads", "mamba_n_heads", "num_heads")
    return {
        "kind": "mamba2",
        "heads": heads,
        "inner": heads * config.number("mamba_head_dim", "mamba_d_head", "head_dim"),
        "state": config.number("ssm_state_size", "mamba_d_state", "state_size"),
        "groups": config.number("n_groups", "mamba_n_groups", default=1),
        "conv": config.number("conv_kernel", "mamba_d_conv", default=4),
    }
