"""Write tiny random-weight models with audio input: a text GGUF and its audio projector, one pair
for each way in which llama.cpp reads sounds.

ultravox  Whisper's encoder on 30 s at a time, 50 frames stacked: 30 tokens
qwen2a    Whisper's encoder and pooling: 750 tokens, positions of M-RoPE (Qwen2.5-Omni)
gemma4ua  no encoder: a token for 40 ms of samples, with a sliding window in the text model
both      ultravox, and llava's vision encoder in the same projector
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from models.tiny_gguf import _random, finish, write_llama, write_sliding
from models.tiny_vision import TEMPLATE, VisionModel, add_eyes, write_qwen2vl

KINDS = ("ultravox", "qwen2a", "gemma4ua", "both")
_E, _WIDTH, _FF, _LAYERS, _MEL = 64, 32, 64, 2, 16
# Positions of Whisper's encoder for 30 s.
_POSITIONS = 1500
_STACK = 50
_FRAME = 640


def write_hearing(
    folder: Path, kind: str, *, seed: int = 13, template: str | None = TEMPLATE
) -> VisionModel:
    """Write the pair of that kind into a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    text, projector = folder / f"tiny-{kind}.gguf", folder / f"mmproj-tiny-{kind}.gguf"
    if kind in ("ultravox", "both"):
        write_llama(text, seed=seed, template=template)
    elif kind == "qwen2a":
        write_qwen2vl(text, seed, template)
    elif kind == "gemma4ua":
        write_sliding(text, window=64, seed=seed, template=template)
    else:
        raise ValueError(kind)
    write_projector(projector, kind, seed)
    return VisionModel(text, projector)


def write_projector(path: Path, kind: str, seed: int) -> Path:
    rng = np.random.default_rng(seed + 1)
    w = gguf.GGUFWriter(str(path), "clip")
    w.add_name(f"tiny {kind}")
    w.add_type("mmproj")
    if kind == "both":
        w.add_string("clip.vision.projector_type", "mlp")
        w.add_string("clip.audio.projector_type", "ultravox")
        add_eyes(w, "mlp", rng, image=56, patch=14)
        kind = "ultravox"
    else:
        w.add_string("clip.projector_type", kind)
    _add_ears(w, kind, rng)
    return finish(w, path)


def _add_ears(w: gguf.GGUFWriter, kind: str, rng: np.random.Generator) -> None:
    w.add_bool("clip.has_audio_encoder", True)
    layers = 0 if kind == "gemma4ua" else _LAYERS
    for key, value in (
        ("embedding_length", _WIDTH), ("feed_forward_length", _FF), ("block_count", layers), ("projection_dim", _E),
        ("attention.head_count", 2), ("num_mel_bins", _MEL), ("projector.stack_factor", _STACK),
    ):  # fmt: skip
        w.add_uint32(f"clip.audio.{key}", value)
    w.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)
    if kind == "gemma4ua":
        w.add_tensor("mm.a.input_projection.weight", _random(rng, _E, _FRAME) * 4)
        return
    _whisper(w, rng)
    if kind == "ultravox":
        w.add_tensor("mm.a.norm_pre.weight", np.ones(_WIDTH * _STACK, dtype=np.float32))
        w.add_tensor("mm.a.mlp.1.weight", _random(rng, 2 * _E, _WIDTH * _STACK))
        w.add_tensor("mm.a.norm_mid.weight", np.ones(_E, dtype=np.float32))
        w.add_tensor("mm.a.mlp.2.weight", _random(rng, _E, _E) * 4)
    else:
        w.add_tensor("mm.a.fc.weight", _random(rng, _E, _WIDTH) * 4)
        w.add_tensor("mm.a.fc.bias", np.zeros(_E, dtype=np.float32))


def _whisper(w: gguf.GGUFWriter, rng: np.random.Generator) -> None:
    """Two convolutions and two layers, whose keys have no bias."""
    for i, inputs in ((1, _MEL), (2, _WIDTH)):
        kernel = (_random(rng, _WIDTH, inputs, 3) / 4).astype(np.float16)
        w.add_tensor(f"a.conv1d.{i}.weight", kernel)
        w.add_tensor(f"a.conv1d.{i}.bias", np.zeros((_WIDTH, 1), dtype=np.float32))
    w.add_tensor("a.position_embd.weight", _random(rng, _POSITIONS, _WIDTH))
    for i in range(_LAYERS):
        for name, rows, columns in (
            ("attn_q", _WIDTH, _WIDTH), ("attn_k", _WIDTH, _WIDTH), ("attn_v", _WIDTH, _WIDTH),
            ("attn_out", _WIDTH, _WIDTH), ("ffn_up", _FF, _WIDTH), ("ffn_down", _WIDTH, _FF),
        ):  # fmt: skip
            w.add_tensor(f"a.blk.{i}.{name}.weight", _random(rng, rows, columns))
            if name != "attn_k":
                w.add_tensor(f"a.blk.{i}.{name}.bias", np.zeros(rows, dtype=np.float32))
        for name in ("ln1", "ln2"):
            w.add_tensor(f"a.blk.{i}.{name}.weight", np.ones(_WIDTH, dtype=np.float32))
            w.add_tensor(f"a.blk.{i}.{name}.bias", np.zeros(_WIDTH, dtype=np.float32))
    w.add_tensor("a.post_ln.weight", np.ones(_WIDTH, dtype=np.float32))
    w.add_tensor("a.post_ln.bias", np.zeros(_WIDTH, dtype=np.float32))
