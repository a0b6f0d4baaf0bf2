"""Write tiny random-weight MLX checkpoints with vision, as mlx-vlm itself saves them: one for each
supported family."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from models.tiny_mlx import END, LLAMA, QWEN35, QWEN35_MOE, VOCAB, write_tokenizer

VIDEO, IMAGE, START, STOP = 506, 507, 508, 509
_PIXTRAL_MARKS = {IMAGE: "[IMG]", START: "[IMG_BREAK]", STOP: "[IMG_END]"}
_GEMMA3_MARKS = {IMAGE: "<image_soft_token>", START: "<start_of_image>", STOP: "<end_of_image>"}
_GEMMA4_MARKS = {IMAGE: "<|image|>", START: "<|image>", STOP: "<image|>", VIDEO: "<|video|>"}
_QWEN_MARKS = {
    VIDEO: "<|video_pad|>", IMAGE: "<|image_pad|>", START: "<|vision_start|>",
    STOP: "<|vision_end|>",
}  # fmt: skip
_MARKS = {"mistral3": _PIXTRAL_MARKS, "pixtral": _PIXTRAL_MARKS, "gemma3": _GEMMA3_MARKS}
_TEXT = {**LLAMA, "model_type": "mistral", "num_hidden_layers": 3}
_PIXTRAL = {
    "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 64,
    "patch_size": 4, "rope_theta": 10000.0, "num_channels": 3,
}  # fmt: skip
_GEMMA4_TEXT = {
    "model_type": "gemma4_text", "hidden_size": 64, "num_hidden_layers": 5,
    "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 64, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "sliding_window": 48,
    "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "full_attention",
    ],
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
}  # fmt: skip
_GEMMA4 = {
    "model_type": "gemma4", "text_config": _GEMMA4_TEXT, "audio_config": None,
    "image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": STOP, "audio_token_id": 0,
    "video_token_id": VIDEO, "vocab_size": VOCAB, "hidden_size": 64,
    "vision_soft_tokens_per_image": 28,
    "vision_config": {
        "model_type": "gemma4_vision", "num_hidden_layers": 2, "head_dim": 16,
        "intermediate_size": 64, "patch_size": 4, "pooling_kernel_size": 3,
        "position_embedding_size": 256, "default_output_length": 28,
    },
}  # fmt: skip
_QWEN_TOWER = {
    "depth": 2, "intermediate_size": 64, "out_hidden_size": 64, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "window_size": 16,
    "fullatt_block_indexes": [1], "num_position_embeddings": 64,
}  # fmt: skip
_QWEN = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START,
    "vision_end_token_id": STOP,
}  # fmt: skip
_QWEN_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "vocab_size": VOCAB,
    "tie_word_embeddings": False, "max_position_embeddings": 4096, "rope_theta": 1e4,
}  # fmt: skip
_QWEN35_ROPE = {
    "mtp_num_hidden_layers": 0,
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "model_type": "mistral3", "text_config": _TEXT, "vision_config": _PIXTRAL,
        "image_token_index": IMAGE, "spatial_merge_size": 2, "vision_feature_layer": -1,
    },
    "ministral3": {
        "model_type": "mistral3", "vision_config": _PIXTRAL, "image_token_index": IMAGE,
        "spatial_merge_size": 2, "vision_feature_layer": -1,
        "text_config": {
            **_TEXT, "model_type": "ministral3", "sliding_window": None, "layer_types": None,
            "rope_parameters": {
                "rope_theta": 10000.0, "rope_type": "default", "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "pixtral": {
        "model_type": "pixtral", "text_config": _TEXT, "vision_config": _PIXTRAL,
        "image_token_index": IMAGE, "vision_feature_layer": -1,
    },
    "gemma3": {
        "model_type": "gemma3", "image_token_index": IMAGE, "vocab_size": VOCAB, "hidden_size": 64,
        "mm_tokens_per_image": 36,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 3,
            "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 48,
            "sliding_window_pattern": 3, "max_position_embeddings": 4096, "vocab_size": VOCAB,
            "mm_tokens_per_image": 36,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "num_hidden_layers": 2, "intermediate_size": 64,
            "patch_size": 4,
        },
    },
    "gemma4": _GEMMA4,
    "gemma4-ahead": {
        **_GEMMA4,
        "text_config": {
            **_GEMMA4_TEXT, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
    },
    "qwen2_5_vl": {
        **_QWEN, **_QWEN_TEXT, "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen2_5_vl"},
    },
    "qwen3_vl": {
        **_QWEN, "model_type": "qwen3_vl",
        "text_config": {
            **_QWEN_TEXT, "model_type": "qwen3_vl_text", "head_dim": 32,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
        },
        "vision_config": {
            **_QWEN_TOWER, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 1]
        },
    },
    "qwen3_5": {
        **_QWEN, "model_type": "qwen3_5",
        "text_config": {**QWEN35, **_QWEN35_ROPE},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5"},
    },
    "qwen3_5_moe": {
        **_QWEN, "model_type": "qwen3_5_moe",
        "text_config": {**QWEN35_MOE, **_QWEN35_ROPE},
        "vision_config": {**_QWEN_TOWER, "model_type": "qwen3_5_moe"},
    },
}  # fmt: skip


def mark(family: str) -> str:
    """Return the text that stands for an image in a prompt."""
    marks = _marks(family)
    if family.startswith("qwen"):
        return f"{marks[START]}{marks[IMAGE]}{marks[STOP]}"
    return marks[START if family == "gemma3" else IMAGE]


def _marks(family: str) -> dict[int, str]:
    if family.startswith("qwen"):
        return _QWEN_MARKS
    return _GEMMA4_MARKS if family.startswith("gemma4") else _MARKS.get(family, _PIXTRAL_MARKS)


def write(
    folder: Path, family: str, *, seed: int = 5, side_px: int = 48, heads: int = 2, layers: int = 2
) -> Path:
    """Write a checkpoint folder of that family with random weights. Images have at most `side_px`;
    the vision tower has that many `heads` and `layers`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    config = _config(family, side_px, heads, layers)
    folder.mkdir(parents=True, exist_ok=True)
    package = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    # from_dict modifies its argument.
    given = json.loads(json.dumps(config))
    made = package.ModelConfig.from_dict(given)
    made.text_config = package.TextConfig.from_dict(given["text_config"])
    made.vision_config = package.VisionConfig.from_dict(given["vision_config"])
    model = package.Model(made)
    rng = np.random.default_rng(seed)

    def random(old: Any) -> Any:
        scale = 1.0 if old.ndim < 2 else 1.0 / np.sqrt(np.prod(old.shape[1:]))
        drawn = rng.standard_normal(old.shape) * scale
        return mx.array((drawn if old.ndim > 1 else 1 + 0.1 * drawn).astype(np.float32))

    model.update(tree_map(random, model.parameters()))
    weights = dict(tree_flatten(model.parameters()))
    if family == "gemma3":
        # Tied, as published: mlx-vlm never reads a separate one.
        del weights["language_model.lm_head.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config |= {
        "architectures": ["TinyForConditionalGeneration"], "eos_token_id": END,
        "torch_dtype": "float32"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(folder)
    _add_marks(folder, _marks(family))
    _write_processor(folder, family, config, side_px)
    return folder


def _config(family: str, side_px: int, heads: int, layers: int) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(CONFIGS[family]))
    vision = config["vision_config"]
    vision |= {
        "image_size": side_px, "num_attention_heads": heads, "num_key_value_heads": heads,
        "num_heads": heads, "hidden_size": 16 * heads,
    }  # fmt: skip
    vision["depth" if "depth" in vision else "num_hidden_layers"] = layers
    if family == "gemma3":
        n_tokens = (side_px // 8) ** 2
        config["mm_tokens_per_image"] = n_tokens
        config["text_config"]["mm_tokens_per_image"] = n_tokens
    if family.startswith("gemma4"):
        n_tokens = (side_px // 12) ** 2 + 2
        vision["default_output_length"] = n_tokens
        config["vision_soft_tokens_per_image"] = n_tokens
    return config


def _write_processor(folder: Path, family: str, config: dict[str, Any], side_px: int) -> None:
    sizes: dict[str, Any] = {"size": {"longest_edge": side_px}, "patch_size": 4}
    if family == "pixtral":
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4}), "utf-8")
    if family == "gemma3":
        sizes = {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": side_px, "width": side_px},
        }
        length = {"image_seq_length": config["mm_tokens_per_image"]}
        (folder / "processor_config.json").write_text(json.dumps(length), "utf-8")
    if family.startswith("gemma4"):
        n_tokens = config["vision_soft_tokens_per_image"]
        sizes = {"patch_size": 4, "pooling_kernel_size": 3, "max_soft_tokens": n_tokens}
    if family.startswith("qwen"):
        sizes = {
            "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64,
            "max_pixels": side_px**2,
        }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes), "utf-8")


def _add_marks(folder: Path, marks: dict[int, str]) -> None:
    """Add special tokens for images in place of made-up words."""
    tokenizer, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    parsed = json.loads(tokenizer.read_text("utf-8"))
    vocab = parsed["model"]["vocab"]
    for token, text in marks.items():
        del vocab[f"Ġw{token}"]
        parsed["added_tokens"].append({**parsed["added_tokens"][0], "id": token, "content": text})
    parsed["added_tokens"].sort(key=lambda added: added["id"])
    tokenizer.write_text(json.dumps(parsed, ensure_ascii=False), "utf-8")
    names = {"image_token": IMAGE, "boi_token": START, "eoi_token": STOP}
    said = {**json.loads(settings.read_text("utf-8"))}
    if marks[START] != "[IMG_BREAK]":
        said["extra_special_tokens"] = {name: marks[token] for name, token in names.items()}
    settings.write_text(json.dumps(said), "utf-8")
