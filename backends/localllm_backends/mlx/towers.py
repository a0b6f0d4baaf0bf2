"""Models whose images mlx-vlm can read for mlx-lm, and the memory for it.

This is known from a checkpoint's config, without loading it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localllm_backends.mlx.files import weight_files

# The same limit as in llama.cpp: with more tokens, the attention of a vision encoder takes
# gigabytes per picture.
MAX_IMAGE_TOKENS = 1024
# A layer's memory at its peak, counted in rows of the layer's width, and how many of these are
# padded. Then the head sizes that Metal's kernel supports.
_LAYER_WIDTHS = 20
_PADDED = 5
_KERNEL_HEADS = (64, 80, 128)
_MAX_HEADER_BYTES = 100 * 10**6
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True, slots=True)
class Family:
    """How mlx-vlm reads images of a model family.

    `module` and `processor`: the processor class and its module.
    `mark`: the placeholder of an image in a prompt (empty: the processor's own).
    `rows`: how time, height and width share the frequencies of a head, if positions have three
    dimensions.
    `pads`: heads of the vision encoder are padded to a size that Metal's kernel supports.
    `masks`: extra score rows in memory, in addition to those of the heads.
    """

    module: str
    processor: str
    mark: str = ""
    rows: Literal["", "chunked", "interleaved"] = ""
    pads: bool = False
    masks: float = 0


_QWEN3 = Family("qwen3_vl", "Qwen3VLProcessor", _QWEN_MARK, "interleaved", pads=True)
# Keys are values of `model_type`.
FAMILIES = {
    "mistral3": Family("mistral3", "Mistral3Processor"),
    "pixtral": Family("pixtral", "PixtralProcessor"),
    "gemma3": Family("gemma3", "Gemma3Processor", "<start_of_image>"),
    "gemma4": Family("gemma4", "Gemma4Processor", pads=True, masks=1.25),
    "qwen2_5_vl": Family("qwen2_5_vl", "Qwen2_5_VLProcessor", _QWEN_MARK, "chunked"),
    "qwen3_vl": _QWEN3,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
}


def has_tower(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint includes a vision encoder.

    Checks the weights too, because a config may describe an encoder whose weights were left out.
    """
    if not config.get("vision_config"):
        return False
    return any(_names_a_tower(file) for file in weight_files(folder))


def _names_a_tower(weights: Path) -> bool:
    """Return whether the file's header names a tensor of a vision encoder."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MAX_HEADER_BYTES))
    return b"vision" in header or b"visual" in header


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Return why the images of such a checkpoint can't be read; None if they can."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        return (
            f"on MLX, images are not supported for {kind!r} models (supported: {known}); for "
            "images, use the model's GGUF file with its projector"
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        return "mlx-vlm is not installed: run `pip install 'localllm[vision]'`"
    return None


def layers_attending_ahead(config: Mapping[str, Any]) -> Literal["", "everywhere", "in windows"]:
    """Return in which layers the tokens of an image attend to each other, as in training."""
    if config["model_type"] == "gemma3":
        return "everywhere"
    text = config.get("text_config", {})
    if text.get("use_bidirectional_attention") == "vision":
        return "in windows"
    return ""


def max_tokens_per_image(config: Mapping[str, Any]) -> int:
    """Return the tokens of the largest image."""
    fixed = config.get("mm_tokens_per_image", config.get("vision_soft_tokens_per_image"))
    return min(int(fixed or MAX_IMAGE_TOKENS), MAX_IMAGE_TOKENS)


def image_buffer_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes that the largest image needs in addition to the weights.

    They hold its pixels as floats, the attention scores of one layer, the activations of one layer,
    and the outputs. A GPU with a kernel for its heads stores no scores. Measured on vision encoders
    of several widths.
    """
    vision = config["vision_config"]
    family = FAMILIES[str(config["model_type"])]
    patches = _max_patches(config)
    side = int(vision.get("patch_size", 16))
    width = int(vision.get("hidden_size", 1024))
    inner = int(vision.get("intermediate_size", 4096))
    heads = int(vision.get("num_heads") or vision.get("num_attention_heads") or 16)
    head = int(vision.get("head_dim") or width // heads)
    rows = _LAYER_WIDTHS * width + 3 * inner
    if family.pads:
        padded = min((size - head for size in _KERNEL_HEADS if size >= head), default=0)
        rows += _PADDED * heads * padded
    each = 2
    if config.get("torch_dtype", config.get("dtype")) == "float32":
        each = 4
    n_elements = each * ((heads + family.masks) * patches + rows)
    frames = int(vision.get("temporal_patch_size", 1))
    pixels = 3 * 4 * frames * side**2
    return int(patches * (n_elements + pixels))


def _max_patches(config: Mapping[str, Any]) -> int:
    """Return the patches of the largest image."""
    vision = config["vision_config"]
    if config["model_type"] == "gemma3":
        side = int(vision["image_size"]) // int(vision["patch_size"])
        return side**2
    merged = config.get("spatial_merge_size") or vision.get("spatial_merge_size")
    side = int(merged or vision.get("pooling_kernel_size") or 1)
    return max_tokens_per_image(config) * side**2
