"""Write tiny models with draft heads (MTP): a HY-V3-shaped dense trunk followed by one or more
NextN blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from models.tiny_gguf import VOCAB, _attention, _ffn, _random, common, finish, vocabulary


def _head(w: gguf.GGUFWriter, rng: np.random.Generator, i: int, e: int, likeness: float) -> None:
    passing = np.concatenate([np.eye(e), np.zeros((e, e))], axis=1).astype(np.float32)
    w.add_tensor(
        f"blk.{i}.nextn.eh_proj.weight",
        (1 - likeness) * _random(rng, e, 2 * e) + 8 * likeness * passing,
    )
    w.add_tensor(f"blk.{i}.nextn.enorm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor(f"blk.{i}.nextn.hnorm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor(f"blk.{i}.nextn.shared_head_norm.weight", np.ones(e, dtype=np.float32))


def write_mtp(
    path: Path, *, heads: int = 1, layers: int = 2, likeness: float = 0.0, seed: int = 5
) -> Path:
    """4 heads, 2 KV heads of 32, and `heads` draft heads with high confidence.

    With `likeness` 0, every weight is random, and the heads' guesses depend on all tokens read.
    With a value towards 1, the trunk depends mostly on its newest token and the heads pass that
    token on unchanged, so most of their guesses equal the model's.
    """
    rng = np.random.default_rng(seed)
    e, d, ff = 64, 32, 128
    w = gguf.GGUFWriter(str(path), "hy_v3")
    common(w, layers=layers + heads, e=e, ff=ff, heads=4, kv=2, d=d, n_ctx=4096)
    w.add_expert_feed_forward_length(ff)
    w.add_uint32("hy_v3.nextn_predict_layers", heads)
    vocabulary(w)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * (8 + 80 * likeness))
    for i in range(layers + heads):
        _attention(w, rng, i, e, 4, 2, d)
        w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(d, dtype=np.float32))
        w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(d, dtype=np.float32))
        _ffn(w, rng, i, e, ff)
    for i in range(layers, layers + heads):
        _head(w, rng, i, e, likeness)
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, e) * 16)
    return finish(w, path)


def write_hybrid_mtp(path: Path, *, likeness: float = 0.0, seed: int = 6) -> Path:
    """Qwen3.5-shaped: gated delta nets (a recurrent state) followed by one attention layer, and one
    draft head."""
    rng = np.random.default_rng(seed)
    e, d, ff, trunk, state, groups, heads = 64, 32, 128, 4, 32, 2, 4
    w = gguf.GGUFWriter(str(path), "qwen35")
    common(w, layers=trunk + 1, e=e, ff=ff, heads=4, kv=2, d=d, n_ctx=4096)
    w.add_uint32("qwen35.nextn_predict_layers", 1)
    w.add_array("qwen35.rope.dimension_sections", [6, 5, 5, 0])
    w.add_uint32("qwen35.full_attention_interval", 4)
    for name, value in (("conv_kernel", 4), ("inner_size", heads * state), ("state_size", state)):
        w.add_uint32(f"qwen35.ssm.{name}", value)
    w.add_uint32("qwen35.ssm.time_step_rank", heads)
    w.add_uint32("qwen35.ssm.group_count", groups)
    vocabulary(w)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * (8 + 80 * likeness))
    mixed = 2 * state * groups + heads * state
    for i in range(trunk + 1):
        w.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(e, dtype=np.float32))
        w.add_tensor(f"blk.{i}.post_attention_norm.weight", np.ones(e, dtype=np.float32))
        if i < trunk - 1:
            w.add_tensor(f"blk.{i}.attn_qkv.weight", _random(rng, mixed, e))
            w.add_tensor(f"blk.{i}.attn_gate.weight", _random(rng, heads * state, e))
            w.add_tensor(f"blk.{i}.ssm_conv1d.weight", _random(rng, mixed, 4))
            w.add_tensor(f"blk.{i}.ssm_dt.bias", _random(rng, heads))
            w.add_tensor(f"blk.{i}.ssm_a", -np.ones(heads, dtype=np.float32))
            w.add_tensor(f"blk.{i}.ssm_beta.weight", _random(rng, heads, e))
            w.add_tensor(f"blk.{i}.ssm_alpha.weight", _random(rng, heads, e))
            w.add_tensor(f"blk.{i}.ssm_norm.weight", np.ones(state, dtype=np.float32))
            w.add_tensor(f"blk.{i}.ssm_out.weight", _random(rng, e, heads * state))
        else:
            w.add_tensor(f"blk.{i}.attn_q.weight", _random(rng, 2 * 4 * d, e))
            w.add_tensor(f"blk.{i}.attn_k.weight", _random(rng, 2 * d, e))
            w.add_tensor(f"blk.{i}.attn_v.weight", _random(rng, 2 * d, e))
            w.add_tensor(f"blk.{i}.attn_output.weight", _random(rng, e, 4 * d))
            w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(d, dtype=np.float32))
            w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(d, dtype=np.float32))
        for name, shape in (("gate", (ff, e)), ("up", (ff, e)), ("down", (e, ff))):
            w.add_tensor(f"blk.{i}.ffn_{name}.weight", _random(rng, *shape))
    _head(w, rng, trunk, e, likeness)
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, e) * 16)
    return finish(w, path)


def write_sliding_mtp(
    path: Path, *, likeness: float = 0.0, window: int = 32, seed: int = 7
) -> Path:
    """MiMo-V2-shaped: sliding windows, also in the draft head, and one layer of full attention."""
    rng = np.random.default_rng(seed)
    e, d, ff, pattern = 64, 32, 128, [True, False, True, True]
    w = gguf.GGUFWriter(str(path), "mimo2")
    common(w, layers=len(pattern), e=e, ff=ff, heads=4, kv=2, d=d, n_ctx=4096)
    w.add_expert_feed_forward_length(ff)
    w.add_uint32("mimo2.nextn_predict_layers", 1)
    w.add_sliding_window(window)
    w.add_array("mimo2.attention.sliding_window_pattern", pattern)
    vocabulary(w)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * (8 + 80 * likeness))
    for i in range(len(pattern)):
        w.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(e, dtype=np.float32))
        w.add_tensor(f"blk.{i}.attn_qkv.weight", _random(rng, (4 + 2 + 2) * d, e))
        w.add_tensor(f"blk.{i}.attn_output.weight", _random(rng, e, 4 * d))
        _ffn(w, rng, i, e, ff)
    _head(w, rng, len(pattern) - 1, e, likeness)
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, e) * 16)
    return finish(w, path)
