"""Writes tiny random-weight MLX checkpoints that see, as mlx-vlm itself saves them: one for each
family whose images are read."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from models.tiny_mlx import END, LLAMA, write_tokenizer

IMAGE, ROW, LAST = 507, 508, 509
_MARKS = {IMAGE: "[IMG]", ROW: "[IMG_BREAK]", LAST: "[IMG_END]"}
_TEXT = {**LLAMA, "model_type": "mistral", "num_hidden_layers": 3}
_PIXTRAL = {
    "model_type": "pixtral", "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 64,
    "patch_size": 4, "rope_theta": 10000.0, "num_channels": 3,
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
}  # fmt: skip


def write(folder: Path, family: str, *, seed: int = 5, side_px: int = 48, heads: int = 2) -> Path:
    """A checkpoint folder of that family with random weights: images have `side_px` at most, and
    the tower so many `heads`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map

    config = json.loads(json.dumps(CONFIGS[family]))
    config["vision_config"] |= {
        "image_size": side_px, "num_attention_heads": heads, "hidden_size": 16 * heads
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    package = importlib.import_module(f"mlx_vlm.models.{config['model_type']}")
    made = package.ModelConfig.from_dict(config)
    made.text_config = package.TextConfig.from_dict(config["text_config"])
    made.vision_config = package.VisionConfig.from_dict(config["vision_config"])
    model = package.Model(made)
    rng = np.random.default_rng(seed)

    def random(old: Any) -> Any:
        scale = 1.0 if old.ndim < 2 else 1.0 / np.sqrt(np.prod(old.shape[1:]))
        drawn = rng.standard_normal(old.shape) * scale
        return mx.array((drawn if old.ndim > 1 else 1 + 0.1 * drawn).astype(np.float32))

    model.update(tree_map(random, model.parameters()))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    config |= {
        "architectures": ["TinyForConditionalGeneration"], "eos_token_id": END,
        "torch_dtype": "float32"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    write_tokenizer(folder)
    _add_marks(folder / "tokenizer.json")
    sizes = {"size": {"longest_edge": side_px}, "patch_size": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes), "utf-8")
    if family == "pixtral":
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": 4}), "utf-8")
    return folder


def _add_marks(tokenizer: Path) -> None:
    """Special tokens for images, in the places of made-up words."""
    parsed = json.loads(tokenizer.read_text("utf-8"))
    vocab = parsed["model"]["vocab"]
    for token, text in _MARKS.items():
        del vocab[f"Ġw{token}"]
        parsed["added_tokens"].append({**parsed["added_tokens"][0], "id": token, "content": text})
    parsed["added_tokens"].sort(key=lambda added: added["id"])
    tokenizer.write_text(json.dumps(parsed, ensure_ascii=False), "utf-8")
