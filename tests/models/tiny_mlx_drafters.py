"""Write tiny random-weight drafters for the checkpoints of tiny_mlx, with their published names and
configs: DFlash, DFlash2 (z-lab), DSpark (also for Gemma 4), and EAGLE-3 (SGLang, speculators)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from models import tiny_mlx

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
MASK = 509
Arrays = dict[str, np.ndarray]
DESIGNS = ("eagle3", "dflash", "dflash2", "dspark")
_GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 3,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 32, "rms_norm_eps": 1e-6, "vocab_size": tiny_mlx.VOCAB,
    "vocab_size_per_layer_input": tiny_mlx.VOCAB, "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0, "sliding_window": 32, "sliding_window_pattern": 3,
    "use_double_wide_mlp": False, "tie_word_embeddings": True, "max_position_embeddings": 4096,
}  # fmt: skip
# A model for each kind of memory. mlx-vlm's own loop drafts for the last four.
TARGETS: dict[str, dict[str, Any]] = {
    "full": tiny_mlx.LLAMA,
    "sliding": tiny_mlx.GEMMA3,
    "delta": {"model_type": "qwen3_5", "text_config": tiny_mlx.QWEN35},
    "moe": {"model_type": "qwen3_5_moe", "text_config": tiny_mlx.QWEN35_MOE},
    "gemma4": {"model_type": "gemma4", "vocab_size": tiny_mlx.VOCAB, "text_config": _GEMMA4},
    "gemma4-full": {
        "model_type": "gemma4",
        "vocab_size": tiny_mlx.VOCAB,
        "text_config": {**_GEMMA4, "layer_types": ["full_attention"] * 3},
    },
}


def write_target(
    folder: Path,
    memory: str,
    *,
    likeness: float = 0.4,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a model whose next token depends mostly on the last one, the more so with higher
    `likeness`, so that `knowing` drafters are often right. `changed`: other values of its
    config."""
    import mlx.core as mx

    tiny_mlx.write(folder, {**TARGETS[memory], **changed}, seed=6)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    for name in weights:
        if "embed_tokens" in name:
            weights[name] = weights[name] * (1 + 20 * likeness)
        if "lm_head" in name:
            weights[name] = weights[name] * 16
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def write_knowing(
    folder: Path, design: str, target: Path, *, wrong: float = 0.2, layout: str = "sglang"
) -> Path:
    """Write a drafter that predicts a token's successor from the tables of `target` (write_target),
    except for a share of tokens. (DFlash without a selector predicts only the first token of a
    block.)"""
    import mlx.core as mx

    held = {n: np.array(v) for n, v in mx.load(str(target / "model.safetensors")).items()}
    embeddings, norm = (
        next(held[n] for n in held if n.endswith(end))
        for end in ("embed_tokens.weight", "model.norm.weight")
    )
    output = next((held[n] for n in held if n.endswith("lm_head.weight")), embeddings)
    settings = json.loads((target / "config.json").read_text())
    n_layers = settings.get("text_config", settings)["num_hidden_layers"]
    known = embeddings / np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    rng = np.random.default_rng(9)
    mixed = rng.permutation(len(known))[: int(wrong * len(known))]
    shuffled = np.arange(len(known))
    shuffled[mixed] = rng.permutation(mixed)
    eye = np.eye(WIDTH, dtype=np.float32)
    if design == "eagle3":
        place = "midlayer" if layout == "sglang" else "layers.0"
        changed = {
            # Each position attends to itself and passes its token's embedding on.
            **{f"{place}.self_attn.{n}_proj.weight": np.hstack([2 * eye, 0 * eye]) for n in "qk"},
            f"{place}.self_attn.v_proj.weight": np.hstack([eye, 0 * eye]),
            f"{place}.self_attn.o_proj.weight": 1e4 * eye,
            f"{place}.input_layernorm.weight": np.ones(WIDTH),
            f"{place}.mlp.down_proj.weight": np.zeros((WIDTH, INNER)),
            "norm.weight": norm,
            "embed_tokens.weight": embeddings,
            "lm_head.weight": output[shuffled],
        }
        return write_eagle3(
            folder,
            layout=layout,
            layers=(1, 2, n_layers),
            kv_heads=HEADS,
            changed=changed,
            norm_before_residual=True,
        )
    still: Arrays = {"fc.weight": np.zeros((WIDTH, 2 * WIDTH)), "norm.weight": norm}
    for i in range(2):
        still[f"layers.{i}.self_attn.o_proj.weight"] = np.zeros((WIDTH, HEADS * HEAD_DIM))
        still[f"layers.{i}.mlp.down_proj.weight"] = np.zeros((WIDTH, INNER))
    if design == "dflash":
        # Masks attend to the newest token, not to each other; context has no values.
        own = "layers.0.self_attn"
        changed = {
            **still,
            "layers.0.input_layernorm.weight": np.ones(WIDTH),
            f"{own}.q_proj.weight": -eye,
            f"{own}.k_proj.weight": eye,
            f"{own}.v_proj.weight": eye,
            f"{own}.o_proj.weight": 1e12 * eye,
            f"{own}.q_norm.weight": np.full(HEAD_DIM, 3.0),
            f"{own}.k_norm.weight": np.full(HEAD_DIM, 3.0),
        }
        return write_dflash(folder, kv_heads=HEADS, changed=changed, num_target_layers=n_layers)
    before = (known * norm)[shuffled]
    if design == "dspark":
        changed = {
            **still,
            "norm.weight": norm * 1e-3,
            "markov_head.markov_w1.weight": before,
            "markov_head.markov_w2.weight": output,
        }
        return write_dflash(
            folder,
            "dspark",
            rank=WIDTH,
            confidence=False,
            changed=changed,
            num_target_layers=n_layers,
        )
    row = known[MASK] * norm
    changed = {
        **still,
        "candidate_selector.predecessor_codebook": 50 * before,
        "candidate_selector.successor_codebook": output,
        "candidate_selector.hidden_projection.weight": np.tile(row / (row @ row), (WIDTH, 1)),
    }
    return write_dflash(
        folder,
        "dflash2",
        rank=WIDTH,
        candidates=tiny_mlx.VOCAB,
        changed=changed,
        num_target_layers=n_layers,
    )


def write(
    folder: Path, design: str, *, layers: tuple[int, ...] = (0, 1), seed: int = 3, **more: Any
) -> Path:
    if design == "eagle3":
        return write_eagle3(folder, seed=seed, **more)
    if design == "gemma4_dspark":
        return write_gemma4_dspark(folder, layers=layers, seed=seed, **more)
    return write_dflash(folder, design, layers=layers, seed=seed, **more)


def write_dflash(
    folder: Path,
    design: str = "dflash",
    *,
    layers: tuple[int, ...] = (0, 1),
    block: int = 8,
    window: int = 0,
    confidence: bool = True,
    kv_heads: int = KV_HEADS,
    rank: int = 8,
    candidates: int = 4,
    bits: int = 0,
    seed: int = 3,
    changed: Mapping[str, np.ndarray] = MappingProxyType({}),
    **more: Any,
) -> Path:
    """Write two layers that fill in blocks of `block` tokens. `changed` replaces weights, and
    `more` changes the config."""
    rng = np.random.default_rng(seed)
    own: dict[str, Any] = {"mask_token_id": MASK, "target_layer_ids": list(layers)}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": block,
        "dflash_config": own, **_sizes(2, kv_heads), "vocab_size": tiny_mlx.VOCAB,
        "num_target_layers": max(layers) + 1,
    }  # fmt: skip
    if window:
        config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    weights: Arrays = {
        "fc.weight": _matrix(rng, WIDTH, WIDTH * len(layers)),
        "hidden_norm.weight": _norm(rng, WIDTH),
        "norm.weight": _norm(rng, WIDTH) * 8,
    }
    for i in range(2):
        weights |= _layer(rng, f"layers.{i}", WIDTH, kv_heads, qk_norm=True)
    if design == "dflash2":
        config["architectures"] = ["DFlash2DraftModel"]
        own |= {
            "conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": rank,
            "selector_top_k": candidates,
        }  # fmt: skip
        for i in range(2):
            for place in ("attention_conv", "mlp_conv"):
                name = f"layers.{i}.{place}"
                weights[f"{name}.base_kernel"] = _matrix(rng, 2, 3, WIDTH)
                weights[f"{name}.kernel_projection.weight"] = _matrix(rng, 2 * 3 * 4, WIDTH)
        for name in ("predecessor", "successor"):
            weights[f"candidate_selector.{name}_codebook"] = _matrix(rng, tiny_mlx.VOCAB, rank) * 8
        weights["candidate_selector.hidden_projection.weight"] = _matrix(rng, rank, WIDTH)
    if design == "dspark":
        own |= {
            "projector_type": "dspark",
            "markov_rank": rank,
            "enable_confidence_head": confidence,
        }
        weights["markov_head.markov_w1.weight"] = _matrix(rng, tiny_mlx.VOCAB, rank) * 8
        weights["markov_head.markov_w2.weight"] = _matrix(rng, tiny_mlx.VOCAB, rank)
        if confidence:
            weights["confidence_head.proj.weight"] = _matrix(rng, 1, WIDTH + rank)
            weights["confidence_head.proj.bias"] = np.full(1, 1.0, np.float32)
    config |= more
    return _save(folder, config, {**weights, **changed}, bits)


def write_gemma4_dspark(
    folder: Path, *, layers: tuple[int, ...] = (0, 1), block: int = 8, seed: int = 3
) -> Path:
    """Write two layers of Gemma 4 with their own tables, which fill in blocks of 1 + `block`
    tokens. Keys and values have one projection."""
    rng = np.random.default_rng(seed)
    head_dim, rank = 2 * HEAD_DIM, 8
    config: dict[str, Any] = {
        "architectures": ["Gemma4DSparkModel"], "model_type": "gemma4_text", "block_size": block,
        **_sizes(2, KV_HEADS), "vocab_size": tiny_mlx.VOCAB, "num_target_layers": max(layers) + 1,
        "mask_token_id": MASK, "target_layer_ids": list(layers), "markov_rank": rank,
        "global_head_dim": head_dim, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
        "rope_parameters": {"full_attention": {"rope_theta": 1e4, "rope_type": "default"}},
    }  # fmt: skip
    weights: Arrays = {
        "fc.weight": _matrix(rng, WIDTH, WIDTH * len(layers)),
        "hidden_norm.weight": _norm(rng, WIDTH),
        "norm.weight": _norm(rng, WIDTH),
        "embed_tokens.weight": _matrix(rng, tiny_mlx.VOCAB, WIDTH),
        "lm_head.weight": _matrix(rng, tiny_mlx.VOCAB, WIDTH) * 16,
        "markov_head.markov_w1.weight": _matrix(rng, tiny_mlx.VOCAB, rank) * 8,
        "markov_head.markov_w2.weight": _matrix(rng, tiny_mlx.VOCAB, rank),
    }
    for i in range(2):
        weights |= {
            f"layers.{i}.self_attn.q_proj.weight": _matrix(rng, HEADS * head_dim, WIDTH),
            f"layers.{i}.self_attn.k_proj.weight": _matrix(rng, head_dim, WIDTH),
            f"layers.{i}.self_attn.o_proj.weight": _matrix(rng, WIDTH, HEADS * head_dim),
            f"layers.{i}.self_attn.q_norm.weight": _norm(rng, head_dim),
            f"layers.{i}.self_attn.k_norm.weight": _norm(rng, head_dim),
            f"layers.{i}.mlp.gate_proj.weight": _matrix(rng, INNER, WIDTH),
            f"layers.{i}.mlp.up_proj.weight": _matrix(rng, INNER, WIDTH),
            f"layers.{i}.mlp.down_proj.weight": _matrix(rng, WIDTH, INNER),
            f"layers.{i}.layer_scalar": np.full(1, 0.7, np.float32),
        }
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            weights[f"layers.{i}.{place}_layernorm.weight"] = _norm(rng, WIDTH)
    return _save(folder, config, weights, 0)


def write_eagle3(
    folder: Path,
    *,
    layout: str = "sglang",
    layers: tuple[int, int, int] = (1, 2, 2),
    n_draft_vocab: int = 0,
    own_tables: bool = True,
    kv_heads: int = KV_HEADS,
    bits: int = 0,
    seed: int = 3,
    changed: Mapping[str, np.ndarray] = MappingProxyType({}),
    **more: Any,
) -> Path:
    """Write one layer that reads the inputs of the model's `layers`. `layout`: names of "sglang" or
    "speculators". `n_draft_vocab`: tokens of its own vocabulary (0: all)."""
    rng = np.random.default_rng(seed)
    n_vocab = n_draft_vocab or tiny_mlx.VOCAB
    sizes = {**_sizes(1, kv_heads), "vocab_size": tiny_mlx.VOCAB}
    if layout == "sglang":
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", **sizes,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        }  # fmt: skip
    else:
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "eagle_aux_hidden_state_layer_ids": list(layers), "norm_before_residual": True,
            "transformer_layer_config": {"model_type": "llama", **sizes},
        }  # fmt: skip
    config["draft_vocab_size"] = n_vocab
    place = "midlayer" if layout == "sglang" else "layers.0"
    weights: Arrays = {
        "fc.weight": _matrix(rng, WIDTH, 3 * WIDTH),
        f"{place}.hidden_norm.weight": _norm(rng, WIDTH),
        **_layer(rng, place, 2 * WIDTH, kv_heads, qk_norm=False),
        "norm.weight": _norm(rng, WIDTH),
    }
    if own_tables or n_draft_vocab:
        weights["lm_head.weight"] = _matrix(rng, n_vocab, WIDTH) * 16
    if own_tables:
        weights["embed_tokens.weight"] = _matrix(rng, tiny_mlx.VOCAB, WIDTH) * 16
    if n_draft_vocab:
        kept = np.sort(rng.permutation(tiny_mlx.VOCAB)[:n_vocab])
        weights["d2t"] = kept.astype(np.int64) - np.arange(n_vocab)
        weights["t2d"] = np.isin(np.arange(tiny_mlx.VOCAB), kept)
    config |= more
    return _save(folder, config, {**weights, **changed}, bits)


def _sizes(n_layers: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": n_layers,
        "num_attention_heads": HEADS, "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096,
    }  # fmt: skip


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def _norm(rng: np.random.Generator, width: int) -> np.ndarray:
    return (1 + 0.1 * rng.standard_normal(width)).astype(np.float32)


def _layer(
    rng: np.random.Generator, name: str, n_in: int, kv_heads: int, *, qk_norm: bool
) -> Arrays:
    weights = {
        f"{name}.input_layernorm.weight": _norm(rng, WIDTH),
        f"{name}.post_attention_layernorm.weight": _norm(rng, WIDTH),
        f"{name}.self_attn.q_proj.weight": _matrix(rng, HEADS * HEAD_DIM, n_in),
        f"{name}.self_attn.k_proj.weight": _matrix(rng, kv_heads * HEAD_DIM, n_in),
        f"{name}.self_attn.v_proj.weight": _matrix(rng, kv_heads * HEAD_DIM, n_in),
        f"{name}.self_attn.o_proj.weight": _matrix(rng, WIDTH, HEADS * HEAD_DIM),
        f"{name}.mlp.gate_proj.weight": _matrix(rng, INNER, WIDTH),
        f"{name}.mlp.up_proj.weight": _matrix(rng, INNER, WIDTH),
        f"{name}.mlp.down_proj.weight": _matrix(rng, WIDTH, INNER),
    }
    if qk_norm:
        weights[f"{name}.self_attn.q_norm.weight"] = _norm(rng, HEAD_DIM)
        weights[f"{name}.self_attn.k_norm.weight"] = _norm(rng, HEAD_DIM)
    return weights


def _save(folder: Path, config: dict[str, Any], weights: Arrays, bits: int) -> Path:
    """Save the checkpoint. `bits`: those of an MLX conversion (0: as published)."""
    import mlx.core as mx

    folder.mkdir(parents=True, exist_ok=True)
    stored: dict[str, Any] = {}
    for name, value in weights.items():
        array = mx.array(value.astype(np.float32) if value.dtype.kind == "f" else value)
        if bits and value.ndim == 2 and value.shape[1] % 32 == 0:
            parts = mx.quantize(array, group_size=32, bits=bits)
            stem = name.removesuffix("weight")
            stored |= dict(zip((name, f"{stem}scales", f"{stem}biases"), parts, strict=True))
        else:
            stored[name] = array
    if bits:
        config["quantization"] = {"group_size": 32, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), stored)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
