"""Write tiny drafters (EAGLE-3 heads, DFlash and DSpark blocks), and a tiny model whose tokens they
can predict."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from models.tiny_gguf import VOCAB, _attention, _ffn, _random, common, finish, vocabulary

E, D, FF, HEADS, KV = 64, 32, 128, 4, 2


def _tables(likeness: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (embeddings, output matrix) of the model."""
    rng = np.random.default_rng(99)
    return _random(rng, VOCAB, E) * (8 + 80 * likeness), _random(rng, VOCAB, E) * 16


def write_target(path: Path, *, layers: int = 3, likeness: float = 0.35, seed: int = 0) -> Path:
    """Write a model with plain attention. With `likeness` towards 1, its next token depends only on
    the newest token."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "llama")
    common(w, layers=layers, e=E, ff=FF, heads=HEADS, kv=KV, d=D, n_ctx=4096)
    vocabulary(w)
    embeddings, output = _tables(likeness)
    w.add_tensor("token_embd.weight", embeddings)
    for i in range(layers):
        _attention(w, rng, i, E, HEADS, KV, D)
        _ffn(w, rng, i, E, FF)
    w.add_tensor("output_norm.weight", np.ones(E, dtype=np.float32))
    w.add_tensor("output.weight", output)
    return finish(w, path)


def write_eagle3(
    path: Path, *, layers: tuple[int, ...] = (0, 1, 2), n_draft_vocab: int = 0, width: int = E, own: bool = True,
    knowing: bool = False, without: str = "", seed: int = 11,
) -> Path:  # fmt: skip
    """Write a drafter of one layer that reads the features of three.
    `n_draft_vocab`: number of tokens that it knows (d2t);
    `width`: of its target model;
    `own`: whether it has its own embeddings and output, or uses the model's.
    `knowing`: its attention reads only the newest token and passes it on, which predicts
    `write_target`; otherwise every weight is random.
    `without`: tensors left out."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "eagle3")
    common(w, layers=1, e=E, ff=FF, heads=HEADS, kv=KV, d=D, n_ctx=4096)
    w.add_array("eagle3.target_layers", list(layers))
    w.add_uint32("eagle3.target_hidden_size", width)
    w.add_bool("eagle3.norm_before_residual", knowing)
    vocabulary(w)
    n = n_draft_vocab or VOCAB
    if own:
        w.add_tensor("token_embd.weight", _random(rng, VOCAB, E) * 8)
        w.add_tensor("output.weight", _random(rng, n, E) * 16)
    if n_draft_vocab:
        w.add_tensor(
            "d2t", np.sort(rng.choice(np.arange(3, VOCAB), n, replace=False)).astype(np.int64)
        )
    w.add_tensor("fc.weight", _random(rng, E, len(layers) * width))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.attn_norm_2"):
        if name != without:
            w.add_tensor(f"{name}.weight", np.ones(E, dtype=np.float32))
    q, k, v = (_random(rng, rows, 2 * E) for rows in (HEADS * D, KV * D, KV * D))
    out = _random(rng, E, HEADS * D)
    if knowing:
        eye = np.eye(E, 2 * E, dtype=np.float32)
        k, v, q = 4 * eye, eye, 4 * np.concatenate([eye[:D], eye[:D], eye[D:], eye[D:]])
        out = np.zeros((E, HEADS * D), dtype=np.float32)
        for head in range(HEADS):
            out[(head // 2) * D : (head // 2 + 1) * D, head * D : (head + 1) * D] = 4 * np.eye(D)
    for name, tensor in (("q", q), ("k", k), ("v", v), ("output", out)):
        w.add_tensor(f"blk.0.attn_{name}.weight", tensor)
    _ffn(w, rng, 0, E, FF)
    return finish(w, path)


def write_dflash(
    path: Path, *, block: int = 4, layers: tuple[int, ...] = (0, 1), markov: bool = False, confidence: bool = False,
    window: int = 0, knowing: float | None = None, own: bool = True, seed: int = 12,
) -> Path:  # fmt: skip
    """Write a drafter of two layers that fill in blocks. `markov`, `confidence`: DSpark's heads;
    `window`: a sliding window in its first layer.
    `knowing`: the likeness of the `write_target` model. The Markov head then predicts its next
    token from the newest one."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "dflash")
    common(w, layers=2, e=E, ff=FF, heads=HEADS, kv=KV, d=D, n_ctx=4096)
    w.add_array("dflash.target_layers", list(layers))
    w.add_uint32("dflash.block_size", block)
    if window:
        w.add_sliding_window(window)
        w.add_array("dflash.attention.sliding_window_pattern", [True, False])
    vocabulary(w)
    w.add_mask_token_id(VOCAB - 1)
    if own:
        w.add_tensor("token_embd.weight", _random(rng, VOCAB, E) * 8)
        w.add_tensor("output.weight", _random(rng, VOCAB, E) * 16)
    w.add_tensor("fc.weight", _random(rng, E, len(layers) * E))
    w.add_tensor("enc.output_norm.weight", np.ones(E, dtype=np.float32))
    w.add_tensor("output_norm.weight", np.full(E, 1 if knowing is None else 0.01, dtype=np.float32))
    for i in range(2):
        _attention(w, rng, i, E, HEADS, KV, D)
        w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(D, dtype=np.float32))
        w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(D, dtype=np.float32))
        _ffn(w, rng, i, E, FF)
    if markov:
        before, after = _random(rng, VOCAB, 16), _random(rng, VOCAB, 16) * 8
        if knowing is not None:
            embeddings, after = _tables(knowing)
            before = embeddings / np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
        w.add_tensor("markov_w1.weight", before)
        w.add_tensor("markov_w2.weight", after)
        if confidence:
            w.add_tensor("conf_proj.weight", _random(rng, 1, E + before.shape[1]) * 4)
    return finish(w, path)


GEMMA_WINDOW = 32
_WIDTHS = {True: 16, False: 32}  # of a head, within a sliding window and with full attention


def _gemma4(w: gguf.GGUFWriter, name: str, windows: list[bool], e: int) -> None:
    common(w, layers=len(windows), e=e, ff=FF, heads=HEADS, kv=KV, d=_WIDTHS[False], n_ctx=4096)
    w.add_sliding_window(GEMMA_WINDOW)
    w.add_array(f"{name}.attention.sliding_window_pattern", windows)
    for key in (
        "attention.key_length_swa",
        "attention.value_length_swa",
        "rope.dimension_count_swa",
    ):
        w.add_uint32(f"{name}.{key}", _WIDTHS[True])
    w.add_float32(f"{name}.rope.freq_base_swa", 1e4)
    w.add_uint32(f"{name}.embedding_length_per_layer_input", 0)
    vocabulary(w)
    w.add_tensor("rope_freqs.weight", np.ones(_WIDTHS[False] // 2, dtype=np.float32))
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))


def _gemma4_layer(
    w: gguf.GGUFWriter,
    rng: np.random.Generator,
    i: int,
    e: int,
    width: int,
    *,
    keeps: bool,
    scale: float,
) -> None:
    for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        w.add_tensor(
            f"blk.{i}.{norm}.weight", np.full(e, scale if "post" in norm else 1.0, dtype=np.float32)
        )
    w.add_tensor(f"blk.{i}.attn_q.weight", _random(rng, HEADS * width, e))
    w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.full(width, 0.25, dtype=np.float32))
    w.add_tensor(f"blk.{i}.attn_output.weight", _random(rng, e, HEADS * width))
    if keeps:
        w.add_tensor(f"blk.{i}.attn_k.weight", _random(rng, KV * width, e))
        w.add_tensor(f"blk.{i}.attn_v.weight", _random(rng, KV * width, e))
        w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(width, dtype=np.float32))
    for name, shape in (("gate", (FF, e)), ("up", (FF, e)), ("down", (e, FF))):
        w.add_tensor(f"blk.{i}.ffn_{name}.weight", _random(rng, *shape))
    w.add_tensor(f"blk.{i}.layer_output_scale.weight", np.ones(1, dtype=np.float32))


def write_gemma4(path: Path, *, likeness: float = 0.0, seed: int = 21) -> Path:
    """Gemma-4-shaped: layers with sliding windows, whose heads have another width than those of the
    full-attention layers."""
    rng, windows = np.random.default_rng(seed), [True, False, True, False]
    w = gguf.GGUFWriter(str(path), "gemma4")
    _gemma4(w, "gemma4", windows, E)
    embeddings, output = _tables(likeness)
    w.add_tensor("token_embd.weight", (embeddings / np.sqrt(E)).astype(np.float32))
    w.add_tensor("output.weight", output)
    for i, window in enumerate(windows):
        _gemma4_layer(w, rng, i, E, _WIDTHS[window], keeps=True, scale=1.0)
    return finish(w, path)


def write_assistant(
    path: Path, *, knowing: bool = False, width: int = E, window: int = GEMMA_WINDOW, seed: int = 22
) -> Path:
    """Write a Gemma 4 assistant of two layers without KV of their own: one reads the KV within the
    window, one all KV. `knowing`: it passes on its newest token, which predicts `write_gemma4`.
    `width`: of its target model."""
    rng, e, name = np.random.default_rng(seed), 2 * E, "gemma4-assistant"
    w = gguf.GGUFWriter(str(path), name)
    _gemma4(w, name, [True, False], e)
    if window != GEMMA_WINDOW:
        w.kv_data[0][f"{name}.attention.sliding_window"].value = window
    w.add_uint32(f"{name}.embedding_length_out", width)
    w.add_uint32(f"{name}.nextn_predict_layers", 2)
    output = _tables(0)[1]
    table = (
        np.concatenate([output, np.zeros((VOCAB, e - E))], axis=1)
        if knowing
        else _random(rng, VOCAB, e) * 16
    )
    w.add_tensor("token_embd.weight", table.astype(np.float32))
    before = np.eye(e, 2 * width, dtype=np.float32) if knowing else _random(rng, e, 2 * width)
    if knowing:
        before[width:] = 0
    w.add_tensor("nextn.pre_projection.weight", before)
    w.add_tensor("nextn.post_projection.weight", _random(rng, width, e))
    for i, windowed in enumerate((True, False)):
        _gemma4_layer(w, rng, i, e, _WIDTHS[windowed], keeps=False, scale=0.1 if knowing else 1.0)
    return finish(w, path)
