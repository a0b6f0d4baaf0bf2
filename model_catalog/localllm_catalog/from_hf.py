"""Makes a Model of a Hugging Face config.json, as MLX folders carry it: the same shapes, read from
other names.

Rules per model type are those of https://github.com/ml-explore/mlx-lm models/*.py (0.32.2) and of
https://github.com/huggingface/transformers configuration_*.py (5.23.0). A config is untrusted:
numbers are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localllm_catalog import config_defaults, shapes, stated
from localllm_catalog.build import build_layers
from localllm_catalog.errors import BadHeaderError, CatalogError
from localllm_catalog.from_gguf import describe
from localllm_catalog.gguf_facts import MAX_LAYERS
from localllm_catalog.names import Format, shown
from localllm_catalog.quants import mlx_bits
from localllm_catalog.types import Experts, Layer, LayerKind, Model, Variant

_MAX_NUMBER = 1 << 40

# What the layer lists of the various configs call a layer.
_KINDS: dict[str, LayerKind] = {
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "recurrent",
    "conv": "recurrent",
    "mamba": "recurrent",
    "moe": "none",
    "mlp": "none",
}
_LETTERS: dict[str, LayerKind] = {"M": "recurrent", "*": "full", "-": "none", "E": "none"}
# Every nth layer is full where the config lists no layers and names no pattern; between them lie
# (kind, n unless it is stated, the config's key of it).
_FULL_EVERY: dict[str, tuple[LayerKind, int, str]] = dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    ("recurrent", 4, "full_attention_interval"),
)
_PERIODS: dict[str, tuple[LayerKind, int, str]] = _FULL_EVERY | {
    name: ("sliding", period, "sliding_window_pattern")
    for period, names in (
        (2, ("gemma2", "gpt_oss")),
        (4, ("cohere2",)),
        (6, ("gemma3", "gemma3_text", "gemma4", "gemma4_text")),
    )
    for name in names
}
_GATED_QUERIES = frozenset({*_FULL_EVERY, "muse_glimmer", "muse_glimmer_text"})
_MAMBAS = frozenset({"mamba", "falcon_mamba", "mamba2"})
_ALL_RECURRENT = _MAMBAS | {"rwkv7"}
_PLAIN_FFN = frozenset({"nemotron_h", "starcoder2", "phi", "gpt2", "gpt_neox", "rwkv7"})
_KNOWN_PLAIN = frozenset(
    {"llama", "mistral", "mistral3", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_vl",
     "qwen3_vl_moe", "phi3", "phimoe", "gemma", "granite", "granitemoe", "smollm3", "glm4",
     "glm4_moe", "glm4_moe_lite",
     "deepseek_v2", "deepseek_v3", "mistral4", "seed_oss", "starcoder2", "minimax", "minimax_m2",
     "olmo2", "stablelm",
     "internlm2", "cohere", "ernie4_5", "hunyuan_v1_dense", "exaone", "nemotron", "laguna",
     "step3p5", "mellum"},
)  # fmt: skip


def model_from_config(
    config: Mapping[str, Any],
    files: Mapping[str, int],
    *,
    repo: str = "",
    template: str = "",
    known: Model | None = None,
    generation: Mapping[str, Any] | None = None,
) -> Model:
    """The Model of a config.json, with one MLX Variant whose bytes are those of `files` (name →
    bytes).

    `template` is the chat template's text, if the caller has it. `known` lends what a config cannot
    say.
    `generation`: the folder's generation_config.json, whose sampling `known`'s goes before. Raises
    BadHeaderError for a config that does not describe a language model, or describes an impossible
    one.
    """
    try:
        raw = _raw(config, repo)
        layers = _overridden(build_layers(raw), _Config(config))
    except CatalogError as error:
        raise BadHeaderError(f"config.json: {error.message}", error.hint) from error
    except (KeyError, TypeError, ValueError) as error:
        raise BadHeaderError(
            f"config.json does not make sense: {error!r}", "the folder may be incomplete"
        ) from error
    model = replace(
        _model(raw, layers, template), sampling=stated.sampling_of_config(generation or {})
    )
    variant = _variant(config, files, repo)
    total, active = shapes.count_params(model)
    if known is not None:
        return replace(
            known,
            layers=layers,
            native_context=model.native_context,
            variants=(variant,),
            sampling=stated.sampling_over(known.sampling, model.sampling),
        )
    return replace(model, params_total=total, params_active=active, variants=(variant,))


class _Config:
    """Bounded look-ups in a config, its text_config first."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        text = config.get("text_config")
        if isinstance(text, Mapping):
            self.text = text
        else:
            self.text = {}
        self.whole = config
        self.type = shown(str(self.text.get("model_type") or config.get("model_type") or ""))
        if self.text and not self.text.get("model_type"):
            self.type = config_defaults.wrapped(self.type)
        # A nested config is written as what differs from its family; one that stands alone states
        # its shapes.
        defaults = config_defaults.of_type(self.type)
        nested = bool(self.text) or self.type in _ALL_RECURRENT or self.type.startswith("gemma")
        self.defaults: Mapping[str, Any] = defaults if nested else {}

    def get(self, *names: str) -> Any:
        """The first of these that is there and not null, else what the family means by its
        absence."""
        for tables in ((self.text, self.whole), (self.defaults,)):
            for name in names:
                for table in tables:
                    if table.get(name) is not None:
                        return table[name]
        return None

    def number(self, *names: str, default: int | None = None) -> int:
        """A whole number from 0 to 2**40; BadHeaderError where it is missing without a default, or
        absurd."""
        value = self.get(*names)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if value is None:
            raise BadHeaderError(
                f"{names[0]} is not stated, and what {self.type or 'a model without a type'} "
                "takes for it is not known",
                "take a GGUF file of the model, or a repository whose config.json says it",
            )
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_NUMBER:
            raise BadHeaderError(f"{names[0]} is {str(value)[:40]!r}, not a plain number")
        return value


def _raw(config: Mapping[str, Any], repo: str) -> dict[str, Any]:
    """The config as a table of our own family files, so that one piece of code builds layers from
    both."""
    facts = _Config(config)
    n_layers = facts.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not 1 <= n_layers <= MAX_LAYERS:
        raise BadHeaderError(f"{n_layers} layers are not a language model")
    hidden = facts.number("hidden_size", "n_embd", "d_model")
    heads = _heads(facts, hidden)
    if not heads or not hidden:
        raise BadHeaderError("a model needs attention heads and a hidden size")
    name = (
        shown(str(config.get("_name_or_path") or repo or facts.type)).rstrip("/").rpartition("/")[2]
        or "model"
    )
    raw: dict[str, Any] = {
        "id": re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "model",
        "name": name,
        "type": facts.type,
        "repo": repo,
        "layers": n_layers,
        "hidden": hidden,
        "ffn": facts.number("intermediate_size", "n_inner", default=4 * hidden),
        "heads": heads,
        "kv_heads": facts.number("num_key_value_heads", default=heads),
        "head_dim": facts.number("head_dim", "attention_head_dim", default=hidden // heads),
        "vocab": facts.number("vocab_size"),
        "context": facts.number("max_position_embeddings", "n_positions", default=0),
        "tied": bool(facts.get("tie_word_embeddings")),
        "attention_gate": facts.type in _GATED_QUERIES,
        "ffn_matrices": 2 if facts.type in _PLAIN_FFN else 3,
        # Blocks that are a mixer or a feed-forward, never both.
        "split_blocks": facts.type == "nemotron_h" or facts.type in _MAMBAS,
        "shared_kv_layers": facts.number("num_kv_shared_layers", default=0),
        "mtp_layers": facts.number("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0),
    }
    if raw["shared_kv_layers"] > n_layers:
        raise BadHeaderError("more layers share their KV than there are")
    if facts.type.startswith("gemma4"):
        raw["per_layer_embedding"] = facts.number("hidden_size_per_layer_input", default=0)
        if facts.get("use_double_wide_mlp"):
            raw["shared_kv_ffn"] = 2 * raw["ffn"]
    _add_attention(raw, facts)
    raw["pattern"] = _pattern(raw, facts)
    _add_recurrent(raw, facts)
    _add_experts(raw, facts)
    return raw


def _overridden(layers: tuple[Layer, ...], facts: _Config) -> tuple[Layer, ...]:
    """`layers` with what per_layer_config says of single ones (by number, or by their kind's
    name)."""
    said = facts.get("per_layer_config")
    if isinstance(said, list):
        said = dict(enumerate(said))
    if not isinstance(said, Mapping):
        return layers
    changed = []
    for index, layer in enumerate(layers):
        of_kind = next((said[word] for word in said if _KINDS.get(str(word)) == layer.kind), None)
        own = said.get(str(index), said.get(index, of_kind))
        if isinstance(own, Mapping) and layer.kind in ("full", "sliding"):
            one = _Config(own)
            head_dim = one.number("head_dim", default=layer.head_dim_k)
            kv_heads = one.number("num_key_value_heads", default=layer.n_kv_heads)
            layer = replace(layer, n_kv_heads=kv_heads, head_dim_k=head_dim, head_dim_v=head_dim)
        changed.append(layer)
    return tuple(changed)


def _heads(facts: _Config, hidden: int) -> int:
    """Attention heads; of models that have none, those that their state is divided into."""
    if facts.type in ("mamba", "falcon_mamba"):
        return 1
    if facts.type == "rwkv7":
        return hidden // max(1, facts.number("head_dim"))
    return facts.number(
        "num_attention_heads", "n_head", *(("num_heads",) if facts.type in _MAMBAS else ())
    )


def _pattern(raw: dict[str, Any], facts: _Config) -> list[str]:
    kinds = _layer_kinds(facts, raw["layers"])
    if not raw["sliding"]["window"]:
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    return ["mla" if kind == "full" and "mla" in raw else kind for kind in kinds]


def _layer_kinds(facts: _Config, n_layers: int) -> list[str]:
    """What a config says of its layers: in a list of words, a string of letters, the numbers of
    those that are full, or a period."""
    letters = facts.get("hybrid_override_pattern")
    listed = facts.get("layer_types", "layers_block_type")
    indices = facts.get("full_attn_idxs")
    if facts.type in _ALL_RECURRENT:
        return ["recurrent"] * n_layers
    if isinstance(listed, list) and len(listed) >= n_layers:
        return [_kind(str(item)) for item in listed[:n_layers]]
    if isinstance(letters, str) and len(letters) == n_layers and set(letters) <= set(_LETTERS):
        return [_LETTERS[letter] for letter in letters]
    between, every, key = _PERIODS.get(facts.type, ("full", 1, ""))
    if isinstance(indices, list):
        between = "recurrent"
        is_full = set(map(str, indices))
    else:
        every = max(1, facts.number(key, default=every))
        is_full = {str(index) for index in range(every - 1, n_layers, every)}
    return ["full" if str(index) in is_full else between for index in range(n_layers)]


def _kind(word: str) -> str:
    if word not in _KINDS:
        raise BadHeaderError(
            f"the layer type {word[:40]!r} is not known", "a newer localllm may know it"
        )
    return _KINDS[word]


def _add_attention(raw: dict[str, Any], facts: _Config) -> None:
    switched_off = facts.get("use_sliding_window") is False
    raw["sliding"] = {
        "window": 0
        if switched_off
        else facts.number("sliding_window", "attention_chunk_size", default=0)
    }
    if facts.type.startswith("gemma4"):
        raw["full"] = {
            "head_dim": facts.number("global_head_dim", default=raw["head_dim"]),
            "kv_heads": facts.number("num_global_key_value_heads", default=raw["kv_heads"]),
            "v_is_k": facts.get("attention_k_eq_v") is True,
        }
    rank = facts.number("kv_lora_rank", default=0)
    if rank:
        raw["mla"] = {
            "rank": rank,
            "rope": facts.number("qk_rope_head_dim"),
            "nope": facts.number("qk_nope_head_dim"),
            "v": facts.number("v_head_dim"),
            "q_rank": facts.number("q_lora_rank", default=0),
        }


def _add_recurrent(raw: dict[str, Any], facts: _Config) -> None:
    if "recurrent" not in raw["pattern"]:
        return
    if facts.get("linear_num_value_heads") is not None:
        raw["recurrent"] = {
            "kind": "gated_delta",
            "key_heads": facts.number("linear_num_key_heads"),
            "value_heads": facts.number("linear_num_value_heads"),
            "state": facts.number("linear_key_head_dim", default=128),
            "conv": facts.number("linear_conv_kernel_dim", default=4),
        }
    elif facts.get("conv_L_cache") is not None:
        raw["recurrent"] = {"kind": "short_conv", "conv": facts.number("conv_L_cache")}
    elif facts.type == "rwkv7":
        ranks = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
        raw["recurrent"] = {
            "kind": "wkv",
            "conv": 0,
            "head": raw["head_dim"],
            "ranks": sum(facts.number(rank, default=64) for rank in ranks),
        }
    elif facts.type in ("mamba", "falcon_mamba"):
        raw["recurrent"] = {
            "kind": "mamba",
            "inner": facts.number("intermediate_size", "d_inner", default=2 * raw["hidden"]),
            "state": facts.number("state_size", "d_state"),
            "rank": facts.number("time_step_rank", default=-(-raw["hidden"] // 16))
            if facts.get("time_step_rank") != "auto"
            else -(-raw["hidden"] // 16),
            "conv": facts.number("conv_kernel", "d_conv"),
        }
    else:
        heads = facts.number("mamba_num_heads", "mamba_n_heads", "num_heads")
        raw["recurrent"] = {
            "kind": "mamba2",
            "heads": heads,
            "inner": heads * facts.number("mamba_head_dim", "mamba_d_head", "head_dim"),
            "state": facts.number("ssm_state_size", "mamba_d_state", "state_size"),
            "groups": facts.number("n_groups", "mamba_n_groups", default=1),
            "conv": facts.number("conv_kernel", "mamba_d_conv", default=4),
        }


def _add_experts(raw: dict[str, Any], facts: _Config) -> None:
    count = facts.number(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0
    )
    if not count:
        return
    active = facts.number("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_top_k")
    if not 1 <= active <= count:
        raise BadHeaderError(f"{active} of {count} experts cannot be used")
    width = facts.number("moe_intermediate_size", default=raw["ffn"])
    shared = facts.number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        default=0,
    )
    n_shared = facts.number("n_shared_experts", default=1 if shared else 0)
    raw["experts"] = {
        "count": count,
        "active": active,
        "ffn": width,
        "shared": n_shared,
        "shared_ffn": shared,
        "dense_layers": min(
            facts.number("first_k_dense_replace", "num_dense_layers", default=0), raw["layers"]
        ),
        "latent": facts.number("moe_latent_size", default=0),
        "beside_dense": facts.type.startswith("gemma4"),
    }


def _model(raw: Mapping[str, Any], layers: tuple[Layer, ...], template: str) -> Model:
    facts = raw.get("experts")
    experts = None
    if facts:
        keys = ("count", "active", "ffn", "shared", "shared_ffn", "dense_layers", "latent")
        experts = Experts(*(int(facts[key]) for key in keys))
    known = raw["type"] in _KNOWN_PLAIN or set(raw["pattern"]) != {"full"}
    return Model(
        id=raw["id"],
        name=raw["name"],
        family=raw["type"],
        params_total=0,
        params_active=0,
        layers=layers,
        hidden_size=raw["hidden"],
        intermediate_size=raw["ffn"],
        n_heads=raw["heads"],
        head_dim=raw["head_dim"],
        vocab_size=raw["vocab"],
        native_context=raw["context"],
        tied_embeddings=raw["tied"],
        experts=experts,
        architecture=describe(layers, experts),
        calls_tools=stated.calls_tools(template),
        reasoning_kind=stated.reasoning_kind(template),
        mtp_layers=raw["mtp_layers"],
        hf_repo=raw["repo"],
        ffn_matrices=raw["ffn_matrices"],
        attention_gate=raw["attention_gate"],
        q_rank=raw.get("mla", {}).get("q_rank", 0),
        lookup_params=raw.get("per_layer_embedding", 0) * raw["layers"] * raw["vocab"],
        shape_warning=""
        if known
        else f"the model type {raw['type']!r} is not known: KV may be less",
    )


# Formats of other programs, by quant_method (QuantizationMethod of
# https://github.com/huggingface/transformers), in words.
_FOREIGN = {
    "fp8": "FP8", "fbgemm_fp8": "FP8 (FBGEMM)", "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "awq": "AWQ", "gptq": "GPTQ", "modelopt": "NVIDIA ModelOpt's format",
}  # fmt: skip
_OUR_MODES = frozenset({"", Format.MLX, "affine", "mxfp4", "mxfp8", "nvfp4", "bitnet"})


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    text = config.get("text_config")
    tables = (config, text if isinstance(text, Mapping) else {})
    found = (
        t.get(key)
        for key in ("quantization", "quantization_config", "compression_config")
        for t in tables
    )
    return next((section for section in found if isinstance(section, Mapping) and section), None)


def foreign_format(config: Mapping[str, Any]) -> str:
    """What another program's format the weights are in, in words ("AWQ", "FP8"); "" where MLX runs
    them."""
    section = _quantization(config) or {}
    method = str(section.get("quant_method") or "").lower()
    if not method and ("load_in_4bit" in section or "load_in_8bit" in section):
        method = "bitsandbytes"
    if method in _OUR_MODES:
        return ""
    return _FOREIGN.get(method, shown(method)[:40])


def quant_of(config: Mapping[str, Any]) -> str:
    """The MLX format a config's quantization section describes: "4bit", "8bit-g32", "mxfp4"; "bf16"
    without one."""
    section = _quantization(config)
    if section is None:
        return "bf16"
    foreign = foreign_format(config)
    if foreign:
        raise BadHeaderError(
            f"its weights are in {foreign}, which MLX does not run",
            "take an MLX conversion of the model (mlx-community has many), or a GGUF file of it",
        )
    mode = str(section.get("mode") or section.get("quant_method") or "affine")
    if mode in ("mxfp4", "mxfp8", "nvfp4"):
        return mode
    if mode == "bitnet":
        return "bf16"
    bits = section.get("bits")
    group = section.get("group_size", 64)
    name = f"{bits}bit" if group == 64 else f"{bits}bit-g{group}"
    mlx_bits(name)
    return name


def _variant(config: Mapping[str, Any], files: Mapping[str, int], repo: str) -> Variant:
    weights = sum(size for name, size in files.items() if name.endswith(".safetensors"))
    if not weights or any(size < 0 for size in files.values()):
        raise BadHeaderError(
            "no .safetensors files with their sizes", "the folder may be incomplete"
        )
    return Variant(
        Format.MLX,
        quant_of(config),
        repo,
        tuple(sorted(files)),
        sum(files.values()),
        exact=True,
        weights_bytes=weights,
        source="the folder's own files",
    )
