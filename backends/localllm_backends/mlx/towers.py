"""Whose images mlx-vlm reads for an mlx-lm model, and what that takes: known from a checkpoint's
config, with nothing loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm_backends.mlx.files import weight_files

# As llama.cpp bounds them: beyond, a tower's attention takes gigabytes for one picture.
MOST_TOKENS = 1024
# Rows as wide as the layer that are held in the middle of it.
_LAYER_WIDTHS = 18
_MOST_HEADER_BYTES = 100 * 10**6


_IN_ROWS = "mlx-lm's positions are in one row, and these models' images have rows and columns"
# The processor of each `model_type`, by its name in mlx-vlm.
PROCESSORS = {"mistral3": "Mistral3Processor", "pixtral": "PixtralProcessor"}


def has_tower(folder: Path, config: Mapping[str, Any]) -> bool:
    """True for a checkpoint that has what reads images: configs speak of it where the weights were
    left out, too."""
    return bool(config.get("vision_config")) and any(map(_names_a_tower, weight_files(folder)))


def _names_a_tower(weights: Path) -> bool:
    """Whether a tensor's name in that file's header is one of a tower's."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return b"vision" in file.read(min(size, _MOST_HEADER_BYTES))


def why_not(config: Mapping[str, Any]) -> str | None:
    """Why the images of such a checkpoint can't be read (None: they can)."""
    kind = str(config.get("model_type", ""))
    if kind not in PROCESSORS:
        known = ", ".join(sorted(PROCESSORS))
        why = _IN_ROWS if kind.startswith("qwen") else f"those of {known} are"
        return (
            f"on MLX images of {kind!r} models are not read ({why}): take its GGUF file, with its "
            "projector, for images"
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        return "mlx-vlm is not installed: run `pip install 'localllm[vision]'`"
    return None


def image_buffer_bytes(config: Mapping[str, Any]) -> int:
    """What reading the largest image takes beside the weights, in bytes: its pixels in floats, the
    scores of a layer's attention (a GPU with a kernel for its heads holds none), and the
    activations of one layer and what came of all. Measured at towers of several widths."""
    vision = config["vision_config"]
    merged = int(config.get("spatial_merge_size") or 1)
    patches = MOST_TOKENS * merged * merged
    width, inner = int(vision.get("hidden_size", 1024)), int(vision.get("intermediate_size", 4096))
    layers, heads = (
        int(vision.get("num_hidden_layers", 24)),
        int(vision.get("num_attention_heads", 16)),
    )
    activations = patches * (width * (layers + _LAYER_WIDTHS) + 3 * inner)
    each = 4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2
    pixels = 3 * 4 * patches * int(vision.get("patch_size", 16)) ** 2
    return each * (heads * patches * patches + activations) + pixels
