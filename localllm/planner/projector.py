"""What an image projector takes beside its model, from its GGUF header or the catalog: its file,
and the buffers it computes in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from localllm.planner.types import backend_of
from localllm_catalog.types import Model, Variant

# Qwen's projectors take images of any size; llama.cpp reserves buffers for 46 × 46 tokens
# (clip.cpp, set_warmup_n_tokens).
_ANY_SIZE_TOKENS_A_SIDE = 46
# What the largest picture takes in the towers of 16 heads that those models have, of 1,024 tokens
# and 4 patches for each: half of it one layer's scores.
_TOWER_BUFFER_BYTES = 10**9
_ANY_SIZE = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")


def projector_bytes(metadata: Mapping[str, Any], file_bytes: int) -> int:
    """Bytes while loaded: the weights as they are in the file, the pixels in floats, the patches
    laid out for the first product in half precision, and one layer's activations. Measured against
    the buffers that llama.cpp says it reserved."""
    patch = _number(metadata, "patch_size", 14)
    side = _number(metadata, "image_size", 448)
    vision_type = metadata.get("clip.vision.projector_type")
    if metadata.get("clip.projector_type", vision_type) in _ANY_SIZE:
        side = _ANY_SIZE_TOKENS_A_SIDE * patch * _number(metadata, "spatial_merge_size", 2)
    patches = (side // max(patch, 1)) ** 2
    pixels = 3 * 4 * side * side
    laid_out = 2 * 3 * patch * patch * patches
    width = _number(metadata, "embedding_length", 1152)
    inner = _number(metadata, "feed_forward_length", 4304)
    activations = 4 * patches * (inner + 4 * width)
    return file_bytes + pixels + max(laid_out, activations)


def reads_images(model: Model, variant: Variant) -> bool:
    """Whether the engine of these files reads the model's images here."""
    engine = backend_of(variant)
    return "image" in model.modality and (engine.projectors or model.id.startswith(engine.towers))


def listed_bytes(model: Model, variant: Variant) -> int:
    """Bytes while loaded, as far as the catalog knows them: the published projector of these files,
    else of the model's others, else what its parameters weigh at 16 bits; and buffers for the
    largest image there, up to 46 × 46 tokens. Of a tower in the model's own files buffers alone. 0
    where no images are read."""
    if not reads_images(model, variant):
        return 0
    if not backend_of(variant).projectors:
        return _TOWER_BUFFER_BYTES
    listed = (one.mmproj_bytes for one in (variant, *model.variants) if one.mmproj_bytes)
    size = next(listed, 2 * model.vision_params)
    most = _ANY_SIZE_TOKENS_A_SIDE**2
    # A fixed square of 256 tokens has 4 × 4 patches of 14 pixels for each (Gemma 3).
    side_px = 56
    if model.image_tokens is not None:
        most = min(most, model.image_tokens.most)
        side_px = model.image_tokens.side_px or side_px
    patch = 14 if side_px % 14 == 0 else 16
    header = {"clip.vision.patch_size": patch, "clip.vision.image_size": math.isqrt(most) * side_px}
    return projector_bytes(header, size)


def _number(metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(f"clip.vision.{key}", default)
    if isinstance(value, int) and value > 0:
        return value
    return default
