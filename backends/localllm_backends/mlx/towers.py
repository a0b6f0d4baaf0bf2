"""Whose images mlx-vlm reads for an mlx-lm model, and what that takes: known from a checkpoint's
config, with nothing loaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localllm_backends.mlx.files import weight_files

# As llama.cpp bounds them: beyond, a tower's attention takes gigabytes for one picture.
MOST_TOKENS = 1024
# Rows as wide as the layer that are held in the middle of it, those of them that are padded, and
# the heads that Metal's kernel takes.
_LAYER_WIDTHS = 20
_PADDED = 5
_KERNEL_HEADS = (64, 80, 128)
_MOST_HEADER_BYTES = 100 * 10**6
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True, slots=True)
class Family:
    """How mlx-vlm reads one: its `processor`, in that `module`, and the `mark` that stands for an
    image in a prompt (empty: as the processor says).
    `rows`: how time, height and width of a token share the frequencies of a head, where a position
    has all three.
    `pads`: the tower's heads are widened to what Metal's kernel takes, `masks`: rows of scores that
    it holds beside those of its heads."""

    module: str
    processor: str
    mark: str = ""
    rows: Literal["", "chunked", "interleaved"] = ""
    pads: bool = False
    masks: float = 0


_QWEN3 = Family("qwen3_vl", "Qwen3VLProcessor", _QWEN_MARK, "interleaved", pads=True)
# By `model_type`.
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
    """True for a checkpoint that has what reads images: configs speak of it where the weights were
    left out, too."""
    if not config.get("vision_config"):
        return False
    return any(_names_a_tower(file) for file in weight_files(folder))


def _names_a_tower(weights: Path) -> bool:
    """Whether a tensor's name in that file's header is one of a tower's."""
    with weights.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(min(size, _MOST_HEADER_BYTES))
    return b"vision" in header or b"visual" in header


def why_not(config: Mapping[str, Any]) -> str | None:
    """Why the images of such a checkpoint can't be read (None: they can)."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        return (
            f"on MLX images of {kind!r} models are not read (those of {known} are): "
            "take its GGUF file, with its projector, for images"
        )
    if importlib.util.find_spec("mlx_vlm") is None:
        return "mlx-vlm is not installed: run `pip install 'localllm[vision]'`"
    return None


def seen_ahead(config: Mapping[str, Any]) -> Literal["", "everywhere", "in windows"]:
    """In which layers the tokens of an image see each other, as the models were trained."""
    if config["model_type"] == "gemma3":
        return "everywhere"
    text = config.get("text_config", {})
    if text.get("use_bidirectional_attention") == "vision":
        return "in windows"
    return ""


def most_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of the largest image."""
    fixed = config.get("mm_tokens_per_image", config.get("vision_soft_tokens_per_image"))
    return min(int(fixed or MOST_TOKENS), MOST_TOKENS)


def image_buffer_bytes(config: Mapping[str, Any]) -> int:
    """What reading the largest image takes beside the weights, in bytes: its pixels in floats, the
    scores of a layer's attention (a GPU with a kernel for its heads holds none), and the
    activations of one layer and what came of all. Measured at towers of several widths."""
    vision = config["vision_config"]
    family = FAMILIES[str(config["model_type"])]
    patches = _most_patches(config)
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
    held = each * ((heads + family.masks) * patches + rows)
    frames = int(vision.get("temporal_patch_size", 1))
    pixels = 3 * 4 * frames * side**2
    return int(patches * (held + pixels))


def _most_patches(config: Mapping[str, Any]) -> int:
    """Patches of the largest image."""
    vision = config["vision_config"]
    if config["model_type"] == "gemma3":
        side = int(vision["image_size"]) // int(vision["patch_size"])
        return side**2
    merged = config.get("spatial_merge_size") or vision.get("spatial_merge_size")
    side = int(merged or vision.get("pooling_kernel_size") or 1)
    return most_tokens(config) * side**2
