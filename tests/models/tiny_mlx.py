"""Write tiny random-weight MLX checkpoints for every kind of memory that the engine must handle:
real files, real kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 512
TURN, END = 510, 511
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor "
    "%}<|turn|>assistant\n"
)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE: 256 bytes, a few merges, made-up words that no merge produces, two
    special tokens at the end."""
    from localllm_backends.mlx.vocabulary import byte_of_char

    bytes_by_char = byte_of_char()
    chars = sorted(bytes_by_char, key=bytes_by_char.__getitem__)
    vocab = {c: i for i, c in enumerate(chars)}
    merges = []
    for pair in ("t h", "th e", "Ġ the", "a n", "i n", "Ġ a", "e r", "Ġ w"):
        left, right = pair.split()
        merges.append([left, right])
        vocab[left + right] = len(vocab)
    while len(vocab) < TURN:
        vocab[f"Ġw{len(vocab)}"] = len(vocab)
    added = [
        {
            "id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for token, text in ((TURN, "<|turn|>"), (END, "<|end|>"))
    ]  # fmt: skip
    pieces = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pieces, "post_processor": None, "decoder": pieces,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), "utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": "<|end|>",
        "model_max_length": 4096, "clean_up_tokenization_spaces": False, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def write(
    folder: Path, config: dict[str, Any], *, seed: int = 0, quantise: dict[str, Any] | None = None
) -> Path:
    """Write a checkpoint folder of the architecture `config["model_type"]` with random weights, as
    mlx-lm itself saves it."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.utils import _get_classes, quantize_model, save_config, save_model

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))

    def random(path: str, old: Any) -> Any:
        if old.ndim < 2:
            return old.astype(mx.float32)
        scale = 3.0 if "embed" in path else 1.0 / np.sqrt(old.shape[-1])
        return mx.array((rng.standard_normal(old.shape) * scale).astype(np.float32))

    model.update(tree_map_with_path(random, model.parameters()))
    config = {
        **config,
        "eos_token_id": END,
        "architectures": ["TinyForCausalLM"],
        "torch_dtype": "float32",
    }
    if quantise is not None:
        model, config = quantize_model(model, config, **quantise)
    save_model(folder, model)
    save_config(dict(config), folder / "config.json")
    write_tokenizer(folder)
    return folder


LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip


def write_llama(folder: Path) -> Path:
    """Plain attention."""
    return write(folder, LLAMA)


def write_4bit(folder: Path) -> Path:
    """The same with 4-bit weights."""
    return write(folder, LLAMA, quantise={"group_size": 32, "bits": 4})


def write_8bit(folder: Path) -> Path:
    """The same with 8-bit weights."""
    return write(folder, LLAMA, quantise={"group_size": 64, "bits": 8})


def write_mxfp4(folder: Path) -> Path:
    """The same with weights in 4-bit floats with shared exponents."""
    return write(folder, LLAMA, quantise={"group_size": 32, "bits": 4, "mode": "mxfp4"})


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "query_pre_attn_scalar": 32,
    "sliding_window": 32, "sliding_window_pattern": 3, "max_position_embeddings": 4096,
}  # fmt: skip


def write_sliding(folder: Path, *, window: int = 32) -> Path:
    """Gemma-3-shaped: every third layer has full attention, the others a sliding window."""
    return write(folder, {**GEMMA3, "sliding_window": window}, seed=1)


def write_moe(folder: Path) -> Path:
    """Qwen3-MoE-shaped: every layer routes each token to 2 of 8 experts."""
    config = {
        "model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "rope_theta": 1e4, "num_experts": 8, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
    }  # fmt: skip
    return write(folder, config, seed=3)


def write_mla(folder: Path) -> Path:
    """MiniCPM3-shaped: latent attention (keys and values from one low-rank projection, of different
    widths)."""
    config = {
        "model_type": "minicpm3", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "dim_model_base": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
        "kv_lora_rank": 32,
        "scale_depth": 1.4, "scale_emb": 1.0, "max_position_embeddings": 4096, "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "longrope", "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 8, "long_factor": [1.0] * 8,
        },
    }  # fmt: skip
    return write(folder, config, seed=4)


def write_hybrid(folder: Path) -> Path:
    """LFM2-shaped: short-convolution layers (fixed state) with attention layers between them."""
    config = {
        "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "conv_bias": False, "conv_L_cache": 3, "block_dim": 64, "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "block_ff_dim": 128,
        "full_attn_idxs": [2],
    }  # fmt: skip
    return write(folder, config, seed=2)


def write_recurrent(folder: Path) -> Path:
    """Qwen3-Next-shaped: gated delta-net layers with an attention layer and routed experts."""
    config = {
        "model_type": "qwen3_next", "hidden_size": 64, "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [], "moe_intermediate_size": 64,
        "rms_norm_eps": 1e-6, "vocab_size": VOCAB, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096, "full_attention_interval": 2, "norm_topk_prob": True,
    }  # fmt: skip
    return write(folder, config, seed=5)


MIMO: dict[str, Any] = {
    "model_type": "mimo", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "rope_theta": 10000.0, "num_nextn_predict_layers": 1, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN35: dict[str, Any] = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
QWEN35_MOE: dict[str, Any] = {
    **QWEN35, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
# The published names of a head's weights: the prefix of its layer's weights, then its norms and its
# projection of embedding and hidden state. The first two norms are in the order in which the
# projection joins their outputs.
MTP_NAMES = {
    "mimo": (
        "model.mtp_layers.0.",
        "hidden_layernorm",
        "token_layernorm",
        "final_layernorm",
        "input_proj",
    ),
    "qwen": ("mtp.layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc"),
}


def write_mtp(folder: Path, family: str = "mimo", *, likeness: float = 0.0) -> Path:
    """Write a model with one draft head, whose layer is in `folder`/head as a separate model:
    MiMo-shaped (plain attention), or Qwen3.5-shaped ("qwen": gated delta nets; "qwen-moe": with
    routed experts). `likeness` as in tiny_mtp.write_mtp."""
    import mlx.core as mx

    one = {"num_hidden_layers": 1, "full_attention_interval": 1}
    if family == "mimo":
        config, single = MIMO, {**MIMO, **one}
    else:
        text, kind = (QWEN35, "qwen3_5") if family == "qwen" else (QWEN35_MOE, "qwen3_5_moe")
        config, single = ({"model_type": kind, "text_config": t} for t in (text, {**text, **one}))
    root = "model." if family == "mimo" else "language_model.model."
    weights = dict(mx.load(str(write(folder, config, seed=6) / "model.safetensors")))
    for name in [n for n in weights if "embed_tokens" in n or "lm_head" in n]:
        weights[name] = weights[name] * ((8 + 80 * likeness) / 3 if "embed" in name else 16)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    layer = mx.load(str(write(folder / "head", single, seed=7) / "model.safetensors"))
    prefix, first, second, norm, join = MTP_NAMES[family.removesuffix("-moe")]
    head = {
        n.replace(f"{root}layers.0.", prefix): a
        for n, a in layer.items()
        if f"{root}layers.0." in n
    }
    rng, e = np.random.default_rng(8), 64
    prefix = prefix.replace("mtp.layers.0.", "mtp.")
    for name in (first, second, norm):
        head[f"{prefix}{name}.weight"] = mx.array(
            (1 + 0.1 * rng.standard_normal(e)).astype(np.float32)
        )
    halves = [np.zeros((e, e)), np.eye(e)] if family == "mimo" else [np.eye(e), np.zeros((e, e))]
    mixed = (1 - likeness) * rng.standard_normal((e, 2 * e)) / np.sqrt(
        2 * e
    ) + 8 * likeness * np.concatenate(halves, axis=1)
    head[f"{prefix}{join}.weight"] = mx.array(mixed.astype(np.float32))
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), head, {"format": "mlx"})
    return folder


def as_published(folder: Path, to: Path) -> Path:
    """Write the Qwen3.5-shaped checkpoint in `folder` as its makers would have saved it: other
    names, norms minus one, convolutions in another layout."""
    import shutil

    import mlx.core as mx

    shutil.copytree(
        folder, to, ignore=shutil.ignore_patterns("*.safetensors", "head", "*.index.json")
    )
    raw = {}
    for file in folder.glob("*.safetensors"):
        for name, value in mx.load(str(file)).items():
            long = name.replace("language_model.model.", "model.language_model.").replace(
                "language_model.lm_head", "lm_head"
            )
            if "conv1d" in name:
                value = value.moveaxis(1, 2)
            elif value.ndim == 1 and "norm" in name and "linear_attn" not in name:
                value = value - 1
            raw[long] = value
    for name in [n for n in raw if n.endswith("switch_mlp.gate_proj.weight")]:
        layer = name.removesuffix("switch_mlp.gate_proj.weight")
        both = [raw.pop(f"{layer}switch_mlp.{half}_proj.weight") for half in ("gate", "up")]
        raw[f"{layer}experts.gate_up_proj"] = mx.concatenate(both, axis=-2)
        raw[f"{layer}experts.down_proj"] = raw.pop(f"{layer}switch_mlp.down_proj.weight")
    mx.save_safetensors(str(to / "model.safetensors"), raw, {"format": "pt"})
    return to


SHAPES: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama,
    "sliding": write_sliding,
    "moe": write_moe,
    "mla": write_mla,
    "hybrid": write_hybrid,
    "recurrent": write_recurrent,
    "4bit": write_4bit,
    "8bit": write_8bit,
    "mxfp4": write_mxfp4,
    "mtp": write_mtp,
    "mtp-hybrid": lambda folder: write_mtp(folder, "qwen"),
}


class Calls:
    """Counts the calls of a loaded backend's model."""

    def __init__(self, backend: Any) -> None:
        self.n, self._model = 0, backend.stepper.model
        backend.stepper.model = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.n += 1
        return self._model(*args, **kwargs)
