"""Build a Model from a Hugging Face config.json, as in MLX folders: the same shapes under other
names.

Rules per model type are those of https://github.com/ml-explore/mlx-lm models/*.py (0.32.2) and of
https://github.com/huggingface/transformers configuration_*.py (5.23.0). A config is untrusted, so
numbers are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from localllm_catalog import shapes, stated
from localllm_catalog.architectures import MAX_LAYERS
from localllm_catalog.build import build_layers
from localllm_catalog.errors import BadHeaderError, CatalogError
from localllm_catalog.from_gguf import architecture_word
from localllm_catalog.hf_config import ALL_RECURRENT, MAMBAS, Config
from localllm_catalog.layers import mixer
from localllm_catalog.names import Format, shown
from localllm_catalog.quants import mlx_bits
from localllm_catalog.types import Experts, Layer, Model, Variant

# For configs that list no layers and name no pattern, each nth layer is full. Values: (kind of the
# other layers, default n, the config's key for n).
_FULL_EVERY: dict[str, tuple[str, int, str]] = dict.fromkeys(
    ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    ("recurrent", 4, "full_attention_interval"),
)
_LAYER_PERIODS: dict[str, tuple[str, int, str]] = _FULL_EVERY | {
    name: ("sliding", period, "sliding_window_pattern")
    for period, names in (
        (2, ("gemma2", "gpt_oss")),
        (4, ("cohere2",)),
        (6, ("gemma3", "gemma3_text", "gemma4", "gemma4_text")),
    )
    for name in names
}
_GATED_QUERIES = frozenset({*_FULL_EVERY, "muse_glimmer", "muse_glimmer_text"})
_UNGATED_FFN = frozenset({"nemotron_h", "starcoder2", "phi", "gpt2", "gpt_neox", "rwkv7"})
_FULL_ATTENTION_TYPES = frozenset(
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
    """Return the Model of a config.json, with one MLX Variant whose bytes are those of `files`
    (name → bytes).

    - `template`: the chat template's text, if available.
    - `known`: provides facts that a config lacks.
    - `generation`: the folder's generation_config.json. The sampling of `known` takes precedence
      over it.

    Raises BadHeaderError if the config is not of a language model, or describes an impossible one.
    """
    try:
        table = _family_table(config, repo)
        layers = _with_overridden_layers(build_layers(table), Config(config))
    except CatalogError as error:
        raise BadHeaderError(f"config.json: {error.message}", error.hint) from error
    except (KeyError, TypeError, ValueError) as error:
        raise BadHeaderError(
            f"config.json has contradictory values: {error!r}", "the folder may be incomplete"
        ) from error
    model = replace(
        _model(table, layers, template), sampling=stated.sampling_of_config(generation or {})
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


def _family_table(config: Mapping[str, Any], repo: str) -> dict[str, Any]:
    """Convert the config to a table like those of our family files, so that the same code builds
    layers from both."""
    facts = Config(config)
    n_layers = facts.number("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if not 1 <= n_layers <= MAX_LAYERS:
        raise BadHeaderError(f"{n_layers} layers are not a language model")
    hidden = facts.number("hidden_size", "n_embd", "d_model")
    heads = _heads(facts, hidden)
    if not heads or not hidden:
        raise BadHeaderError("a model needs attention heads and a hidden size")
    path = shown(str(config.get("_name_or_path") or repo or facts.type))
    name = path.rstrip("/").rpartition("/")[2] or "model"
    table: dict[str, Any] = {
        "id": re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "model",
        "name": name,
        "type": facts.type,
        "repo": repo,
    }
    table |= {
        "layers": n_layers,
        "hidden": hidden,
        "ffn": facts.number("intermediate_size", "n_inner", default=4 * hidden),
        "heads": heads,
        "kv_heads": facts.number("num_key_value_heads", default=heads),
        "head_dim": facts.number("head_dim", "attention_head_dim", default=hidden // heads),
        "vocab": facts.number("vocab_size"),
        "context": facts.number("max_position_embeddings", "n_positions", default=0),
    }
    table |= {
        "tied": bool(facts.get("tie_word_embeddings")),
        "attention_gate": facts.type in _GATED_QUERIES,
        "ffn_matrices": 2 if facts.type in _UNGATED_FFN else 3,
        # Each block is a mixer or a feed-forward, never both.
        "split_blocks": facts.type == "nemotron_h" or facts.type in MAMBAS,
        "shared_kv_layers": facts.number("num_kv_shared_layers", default=0),
        "mtp_layers": facts.number("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0),
    }
    if table["shared_kv_layers"] > n_layers:
        raise BadHeaderError(
            "the number of layers with shared KV is larger than the number of layers"
        )
    if facts.type.startswith("gemma4"):
        table["per_layer_embedding"] = facts.number("hidden_size_per_layer_input", default=0)
        if facts.get("use_double_wide_mlp"):
            table["shared_kv_ffn"] = 2 * table["ffn"]
    table["pattern"] = mixer.read_config(_layer_words(facts, n_layers), facts, table)
    _add_experts(table, facts)
    return table


def _with_overridden_layers(layers: tuple[Layer, ...], facts: Config) -> tuple[Layer, ...]:
    """Return `layers` with the values of per_layer_config for single layers (by number, or by the
    name of their kind)."""
    layer_configs = facts.get("per_layer_config")
    if isinstance(layer_configs, list):
        layer_configs = dict(enumerate(layer_configs))
    if not isinstance(layer_configs, Mapping):
        return layers
    words = mixer.config_words()
    config_by_kind = {
        words[str(word)]: layer_config
        for word, layer_config in layer_configs.items()
        if str(word) in words
    }
    overridden_layers = []
    for index, layer in enumerate(layers):
        layer_config = layer_configs.get(
            str(index), layer_configs.get(index, config_by_kind.get(layer.kind))
        )
        if isinstance(layer_config, Mapping):
            layer = replace(layer, mixer=layer.mixer.overridden(Config(layer_config)))
        overridden_layers.append(layer)
    return tuple(overridden_layers)


def _heads(facts: Config, hidden: int) -> int:
    """Return the number of attention heads. For models without attention, return the number of
    heads of their state."""
    if facts.type in ("mamba", "falcon_mamba"):
        return 1
    if facts.type == "rwkv7":
        return hidden // max(1, facts.number("head_dim"))
    if facts.type in MAMBAS:
        return facts.number("num_attention_heads", "n_head", "num_heads")
    return facts.number("num_attention_heads", "n_head")


def _layer_words(facts: Config, n_layers: int) -> list[str]:
    """Return the kind of each layer, in the family files' words.

    It comes from a config's list of words, its string of letters, the numbers of the full layers,
    or a period.
    """
    if facts.type in ALL_RECURRENT:
        return ["recurrent"] * n_layers
    words = mixer.config_words()
    layer_types = facts.get("layer_types", "layers_block_type")
    if isinstance(layer_types, list) and len(layer_types) >= n_layers:
        return [_listed_word(words, str(item)) for item in layer_types[:n_layers]]
    letters = facts.get("hybrid_override_pattern")
    if isinstance(letters, str) and len(letters) == n_layers and set(letters) <= words.keys():
        return [words[letter] for letter in letters]
    full_numbers = facts.get("full_attn_idxs")
    if isinstance(full_numbers, list):
        return _with_full(n_layers, "recurrent", set(map(str, full_numbers)))
    other_word, period, key = _LAYER_PERIODS.get(facts.type, ("full", 1, ""))
    period = max(1, facts.number(key, default=period))
    return _with_full(n_layers, other_word, set(map(str, range(period - 1, n_layers, period))))


def _with_full(n_layers: int, other_word: str, full_numbers: Collection[str]) -> list[str]:
    """Return full layers at these numbers, and `other_word` at all others."""
    return ["full" if str(index) in full_numbers else other_word for index in range(n_layers)]


def _listed_word(words: Mapping[str, str], name: str) -> str:
    if name not in words:
        raise BadHeaderError(
            f"the layer type {name[:40]!r} is not known", "a newer localllm may know it"
        )
    return words[name]


def _add_experts(table: dict[str, Any], facts: Config) -> None:
    n_experts = facts.number(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", default=0
    )
    if not n_experts:
        return
    n_active = facts.number(
        "num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_top_k"
    )
    if not 1 <= n_active <= n_experts:
        raise BadHeaderError(f"{n_active} of {n_experts} experts cannot be used")
    expert_width = facts.number("moe_intermediate_size", default=table["ffn"])
    shared_width = facts.number(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "share_expert_dim",
        default=0,
    )
    n_shared = facts.number("n_shared_experts", default=1 if shared_width else 0)
    n_dense = facts.number("first_k_dense_replace", "num_dense_layers", default=0)
    table["experts"] = {
        "count": n_experts,
        "active": n_active,
        "ffn": expert_width,
        "shared": n_shared,
        "shared_ffn": shared_width,
        "dense_layers": min(n_dense, table["layers"]),
        "latent": facts.number("moe_latent_size", default=0),
        "beside_dense": facts.type.startswith("gemma4"),
    }


def _model(table: Mapping[str, Any], layers: tuple[Layer, ...], template: str) -> Model:
    expert_table = table.get("experts")
    experts = None
    if expert_table:
        keys = ("count", "active", "ffn", "shared", "shared_ffn", "dense_layers", "latent")
        experts = Experts(*(int(expert_table[key]) for key in keys))
    per_layer = table.get("per_layer_embedding", 0)
    model = Model(
        id=table["id"],
        name=table["name"],
        family=table["type"],
        params_total=0,
        params_active=0,
        layers=layers,
        hidden_size=table["hidden"],
        intermediate_size=table["ffn"],
        n_heads=table["heads"],
        head_dim=table["head_dim"],
        vocab_size=table["vocab"],
        native_context=table["context"],
        hf_repo=table["repo"],
    )
    model = replace(
        model,
        tied_embeddings=table["tied"],
        experts=experts,
        architecture=architecture_word(layers, experts),
        calls_tools=stated.calls_tools(template),
        reasoning_kind=stated.reasoning_kind(template),
        mtp_layers=table["mtp_layers"],
        ffn_matrices=table["ffn_matrices"],
        attention_gate=table["attention_gate"],
        q_rank=table.get("mla", {}).get("q_rank", 0),
        lookup_params=per_layer * table["layers"] * table["vocab"],
    )
    if table["type"] in _FULL_ATTENTION_TYPES or set(table["pattern"]) != {"full"}:
        return model
    warning = f"the model type {table['type']!r} is unknown: its KV may be smaller"
    return replace(model, shape_warning=warning)


# Names of formats that other programs use, by quant_method (QuantizationMethod of
# https://github.com/huggingface/transformers).
_FOREIGN_FORMATS = {
    "fp8": "FP8", "fbgemm_fp8": "FP8 (FBGEMM)", "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "awq": "AWQ", "gptq": "GPTQ", "modelopt": "NVIDIA ModelOpt's format",
}  # fmt: skip
_MLX_MODES = frozenset({"", Format.MLX, "affine", "mxfp4", "mxfp8", "nvfp4", "bitnet"})


def _quantization_section(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    tables = [config]
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        tables.append(text_config)
    for key in ("quantization", "quantization_config", "compression_config"):
        for table in tables:
            section = table.get(key)
            if isinstance(section, Mapping) and section:
                return section
    return None


def foreign_format(config: Mapping[str, Any]) -> str:
    """Return the name of the other program's format that the weights have ("AWQ", "FP8"), or "" if
    MLX runs them."""
    section = _quantization_section(config) or {}
    method = str(section.get("quant_method") or "").lower()
    if not method and ("load_in_4bit" in section or "load_in_8bit" in section):
        method = "bitsandbytes"
    if method in _MLX_MODES:
        return ""
    return _FOREIGN_FORMATS.get(method, shown(method)[:40])


def quant_of(config: Mapping[str, Any]) -> str:
    """Return the MLX format in a config's quantization section: "4bit", "8bit-g32", "mxfp4"; "bf16"
    without such a section."""
    section = _quantization_section(config)
    if section is None:
        return "bf16"
    foreign_name = foreign_format(config)
    if foreign_name:
        raise BadHeaderError(
            f"its weights are in {foreign_name}, which MLX can't run",
            "use an MLX conversion of the model (mlx-community has many), or a GGUF file",
        )
    mode = str(section.get("mode") or section.get("quant_method") or "affine")
    if mode in ("mxfp4", "mxfp8", "nvfp4"):
        return mode
    if mode == "bitnet":
        return "bf16"
    bits = section.get("bits")
    group_size = section.get("group_size", 64)
    name = f"{bits}bit"
    if group_size != 64:
        name = f"{name}-g{group_size}"
    mlx_bits(name)
    return name


def _variant(config: Mapping[str, Any], files: Mapping[str, int], repo: str) -> Variant:
    weights_bytes = sum(size for name, size in files.items() if name.endswith(".safetensors"))
    if not weights_bytes or any(size < 0 for size in files.values()):
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
        weights_bytes=weights_bytes,
        source="the folder's own files",
    )
