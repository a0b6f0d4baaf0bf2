"""Write tiny random-weight vision models: a text GGUF and its image projector, one pair for each
way in which llama.cpp reads images.

llava   a fixed square, 16 causal tokens an image
gemma3  a fixed square, 16 tokens that attend to each other (not causal), with a sliding window
qwen2vl any size, a token for 56 × 56 pixels, positions in two dimensions (M-RoPE)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from models.tiny_gguf import (
    VOCAB,
    _attention,
    _ffn,
    _random,
    common,
    finish,
    vocabulary,
    write_llama,
    write_sliding,
)

_E, _VIT, _FF, _LAYERS = 64, 32, 64, 3
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


@dataclass(frozen=True)
class VisionModel:
    """A text model and its projector."""

    text: Path
    projector: Path


def write_vision(folder: Path, kind: str, *, seed: int = 11, template: bool = True) -> VisionModel:
    """Write the pair of that kind ("llava", "gemma3", "qwen2vl") into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    text, projector = folder / f"tiny-{kind}.gguf", folder / f"mmproj-tiny-{kind}.gguf"
    chat = TEMPLATE if template else None
    if kind == "llava":
        write_llama(text, seed=seed, template=chat)
        _projector(projector, "mlp", seed, image=56, patch=14)
    elif kind == "gemma3":
        write_sliding(text, window=64, seed=seed, template=chat)
        _projector(projector, "gemma3", seed, image=64, patch=8)
    elif kind == "qwen2vl":
        write_qwen2vl(text, seed, chat)
        _projector(projector, "qwen2vl_merger", seed, image=112, patch=28)
    else:
        raise ValueError(kind)
    return VisionModel(text, projector)


def write_qwen2vl(path: Path, seed: int, template: str | None) -> None:
    """4 heads of 16, positions of time, height and width in a rope of three sections."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "qwen2vl")
    common(w, layers=2, e=_E, ff=128, heads=4, kv=2, d=16, n_ctx=4096)
    w.add_rope_dimension_sections([2, 3, 3, 0])
    vocabulary(w)
    if template:
        w.add_chat_template(template)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, _E) * 8)
    for i in range(2):
        _attention(w, rng, i, _E, 4, 2, 16)
        for name, n in (("q", 64), ("k", 32), ("v", 32)):
            w.add_tensor(f"blk.{i}.attn_{name}.bias", np.zeros(n, dtype=np.float32))
        _ffn(w, rng, i, _E, 128)
    w.add_tensor("output_norm.weight", np.ones(_E, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, _E))
    finish(w, path)


def _projector(path: Path, kind: str, seed: int, *, image: int, patch: int) -> None:
    rng = np.random.default_rng(seed + 1)
    w = gguf.GGUFWriter(str(path), "clip")
    w.add_name(f"tiny {kind}")
    w.add_type("mmproj")
    w.add_string("clip.projector_type", kind)
    add_eyes(w, kind, rng, image=image, patch=patch)
    finish(w, path)


def add_eyes(
    w: gguf.GGUFWriter, kind: str, rng: np.random.Generator, *, image: int, patch: int
) -> None:
    """Add a ViT of three layers, 2 heads of 16, and the projection of its patches to the text
    model's embeddings."""
    w.add_bool("clip.has_vision_encoder", True)
    w.add_bool("clip.use_gelu", True)
    for key, value in (
        ("embedding_length", _VIT), ("feed_forward_length", _FF), ("block_count", _LAYERS), ("projection_dim", _E),
        ("attention.head_count", 2), ("image_size", image), ("patch_size", patch),
    ):  # fmt: skip
        w.add_uint32(f"clip.vision.{key}", value)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    w.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    w.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    w.add_tensor("v.patch_embd.weight", _random(rng, _VIT, 3, patch, patch))
    if kind == "qwen2vl_merger":
        w.add_tensor("v.patch_embd.weight.1", _random(rng, _VIT, 3, patch, patch))
    else:
        w.add_tensor("v.position_embd.weight", _random(rng, (image // patch) ** 2, _VIT))
    for i in range(_LAYERS):
        for name, rows, columns in (
            ("attn_q", _VIT, _VIT), ("attn_k", _VIT, _VIT), ("attn_v", _VIT, _VIT), ("attn_out", _VIT, _VIT),
            ("ffn_up", _FF, _VIT), ("ffn_down", _VIT, _FF),
        ):  # fmt: skip
            w.add_tensor(f"v.blk.{i}.{name}.weight", _random(rng, rows, columns))
            w.add_tensor(f"v.blk.{i}.{name}.bias", np.zeros(rows, dtype=np.float32))
        for name in ("ln1", "ln2"):
            w.add_tensor(f"v.blk.{i}.{name}.weight", np.ones(_VIT, dtype=np.float32))
            w.add_tensor(f"v.blk.{i}.{name}.bias", np.zeros(_VIT, dtype=np.float32))
    w.add_tensor("v.post_ln.weight", np.ones(_VIT, dtype=np.float32))
    w.add_tensor("v.post_ln.bias", np.zeros(_VIT, dtype=np.float32))
    if kind == "gemma3":
        w.add_uint32("clip.vision.projector.scale_factor", 2)
        w.add_tensor("mm.input_projection.weight", _random(rng, _VIT, _E) * 4)
        w.add_tensor("mm.soft_emb_norm.weight", np.ones(_VIT, dtype=np.float32))
    else:
        wide = 4 * _VIT if kind == "qwen2vl_merger" else _VIT
        for i, rows, columns in ((0, 2 * _VIT, wide), (2, _E, 2 * _VIT)):
            w.add_tensor(f"mm.{i}.weight", _random(rng, rows, columns) * 4)
            w.add_tensor(f"mm.{i}.bias", np.zeros(rows, dtype=np.float32))
