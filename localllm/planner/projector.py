"""Bytes that a projector of images and sounds needs in addition to its model: its file and its compute
buffers. Read from its GGUF header or the catalog."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from localllm.planner.types import backend_of
from localllm_catalog.types import Model, Variant

# Qwen's projectors take images of any size. llama.cpp reserves buffers for 46 × 46 tokens
# (clip.cpp, set_warmup_n_tokens).
_ANY_SIZE_TOKENS_A_SIDE = 46
# Buffers for the largest image in the vision towers of those models: 16 heads, 1,024 tokens, 4
# patches for each. Half of it is one layer's scores.
_TOWER_BUFFER_BYTES = 10**9
# Whisper's encoder reads 3,000 frames of mel bands at once, and halves them to 1,500 positions.
# llama.cpp reserves buffers for as many frames in every audio encoder (clip-model.h,
# warmup_audio_size).
_MEL_FRAMES = 3000
# Tensors of a few numbers, and alignment.
_FIXED_BYTES = 2**14
# Gemma 4's larger models have no encoder: frames of 640 samples go straight into the model.
_RAW_KIND = "gemma4ua"
_RAW_SAMPLES = 640
_ANY_SIZE_KINDS = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger")


def projector_bytes(metadata: Mapping[str, Any], file_bytes: int) -> int:
    """Return the bytes while loaded: the weights as stored, and the buffers of each encoder.

    Checked against the buffers that llama.cpp reports.
    """
    need_bytes = file_bytes
    audio = reads_sounds(metadata)
    if metadata.get("clip.has_vision_encoder", not audio):
        need_bytes += _image_buffer_bytes(metadata)
    if audio:
        need_bytes += _audio_buffer_bytes(metadata)
    return need_bytes


def _image_buffer_bytes(metadata: Mapping[str, Any]) -> int:
    """The pixels as float32, the patches as float16 input of the first product, and one layer's
    activations."""
    patch = _number(metadata, "patch_size", 14)
    side_px = _number(metadata, "image_size", 448)
    vision_type = metadata.get("clip.vision.projector_type")
    if metadata.get("clip.projector_type", vision_type) in _ANY_SIZE_KINDS:
        side_px = _ANY_SIZE_TOKENS_A_SIDE * patch * _number(metadata, "spatial_merge_size", 2)
    patches = (side_px // max(patch, 1)) ** 2
    pixel_bytes = 3 * 4 * side_px * side_px
    unfolded_bytes = 2 * 3 * patch * patch * patches
    width = _number(metadata, "embedding_length", 1152)
    inner = _number(metadata, "feed_forward_length", 4304)
    activations = 4 * patches * (inner + 4 * width)
    return pixel_bytes + max(unfolded_bytes, activations)


def _audio_buffer_bytes(metadata: Mapping[str, Any]) -> int:
    """The frames as float32, and the larger of the first convolution and one layer's activations."""
    kind = metadata.get("clip.projector_type", metadata.get("clip.audio.projector_type"))
    if kind == _RAW_KIND:
        output_width = _number(metadata, "projection_dim", 3840, "audio")
        return 4 * _MEL_FRAMES * (2 * _RAW_SAMPLES + output_width)
    bands = _number(metadata, "num_mel_bins", 128, "audio")
    width = _number(metadata, "embedding_length", 1280, "audio")
    inner = _number(metadata, "feed_forward_length", 5120, "audio")
    convolution = _MEL_FRAMES * (4 * width + 2 * 3 * bands)
    activations = 4 * _MEL_FRAMES // 2 * max(4 * width, 2 * width + inner)
    return 4 * _MEL_FRAMES * bands + max(convolution, activations) + _FIXED_BYTES


def reads_sounds(metadata: Mapping[str, Any]) -> bool:
    """Return whether the projector with this header has an audio encoder."""
    return metadata.get("clip.has_audio_encoder") is True


def reads_images(model: Model, variant: Variant) -> bool:
    """Return whether the engine of these files can read images for this model."""
    engine = backend_of(variant)
    return "image" in model.modality and (engine.projectors or model.id.startswith(engine.towers))


def reads_audio(model: Model, variant: Variant) -> bool:
    """Return whether the engine of these files can read sounds for this model."""
    return "audio" in model.modality and backend_of(variant).projectors


def listed_bytes(model: Model, variant: Variant) -> int:
    """Return the bytes while loaded, as far as the catalog knows them; 0 if only text is read.

    The weights are those of the published projector of these files, else of the model's other
    files, else of its parameters at 16 bits. The buffers are for the largest image, up to 46 × 46
    tokens. A vision tower in the model's own files needs only buffers.
    """
    has_sounds = reads_audio(model, variant)
    if not reads_images(model, variant) and not has_sounds:
        return 0
    if not backend_of(variant).projectors:
        return _TOWER_BUFFER_BYTES
    listed_sizes = (
        listed_variant.mmproj_bytes
        for listed_variant in (variant, *model.variants)
        if listed_variant.mmproj_bytes
    )
    weights_size = next(listed_sizes, 2 * model.vision_params)
    max_tokens = _ANY_SIZE_TOKENS_A_SIDE**2
    # A fixed square of 256 tokens has 4 × 4 patches of 14 pixels for each (Gemma 3).
    side_px = 56
    if model.image_tokens is not None:
        max_tokens = min(max_tokens, model.image_tokens.most)
        side_px = model.image_tokens.side_px or side_px
    patch_px = 14 if side_px % 14 == 0 else 16
    header = {
        "clip.vision.patch_size": patch_px,
        "clip.vision.image_size": math.isqrt(max_tokens) * side_px,
        "clip.has_vision_encoder": reads_images(model, variant),
        "clip.has_audio_encoder": has_sounds,
    }
    return projector_bytes(header, weights_size)


def _number(metadata: Mapping[str, Any], key: str, default: int, encoder: str = "vision") -> int:
    value = metadata.get(f"clip.{encoder}.{key}", default)
    if isinstance(value, int) and value > 0:
        return value
    return default
