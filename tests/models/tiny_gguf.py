"""Write tiny random-weight GGUF models for every kind of memory that the engine must handle: real
files, real kernels."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

VOCAB = 512


def vocabulary(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece-style vocabulary: unk, bos, eos, 256 bytes, then made-up words and two
    control tokens."""
    tokens = [b"<unk>", b"<s>", b"</s>"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    for i in range(256):
        tokens.append(f"<0x{i:02X}>".encode())
        types.append(gguf.TokenType.BYTE)
    tokens.append("▁".encode())
    types.append(gguf.TokenType.NORMAL)
    while len(tokens) < VOCAB - 2:
        tokens.append(f"▁w{len(tokens)}".encode())
        types.append(gguf.TokenType.NORMAL)
    tokens += [b"<|turn|>", b"<|end|>"]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def _attention(
    w: gguf.GGUFWriter, rng: np.random.Generator, i: int, e: int, heads: int, kv: int, d: int
) -> None:
    w.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor(f"blk.{i}.attn_q.weight", _random(rng, heads * d, e))
    w.add_tensor(f"blk.{i}.attn_k.weight", _random(rng, kv * d, e))
    w.add_tensor(f"blk.{i}.attn_v.weight", _random(rng, kv * d, e))
    w.add_tensor(f"blk.{i}.attn_output.weight", _random(rng, e, heads * d))


def _ffn(w: gguf.GGUFWriter, rng: np.random.Generator, i: int, e: int, ff: int) -> None:
    w.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor(f"blk.{i}.ffn_gate.weight", _random(rng, ff, e))
    w.add_tensor(f"blk.{i}.ffn_up.weight", _random(rng, ff, e))
    w.add_tensor(f"blk.{i}.ffn_down.weight", _random(rng, e, ff))


def common(
    w: gguf.GGUFWriter,
    *,
    layers: int,
    e: int,
    ff: int,
    heads: int,
    kv: int | list[int],
    d: int,
    n_ctx: int,
) -> None:
    w.add_name("tiny")
    w.add_context_length(n_ctx)
    w.add_embedding_length(e)
    w.add_block_count(layers)
    w.add_feed_forward_length(ff)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_key_length(d)
    w.add_value_length(d)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(d)
    w.add_vocab_size(VOCAB)


def finish(w: gguf.GGUFWriter, path: Path) -> Path:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_llama(
    path: Path,
    *,
    layers: int = 2,
    e: int = 64,
    seed: int = 0,
    n_ctx: int = 4096,
    sampling: dict[str, float] | None = None,
    template: str | None = None,
    ends: dict[str, int] | None = None,
) -> Path:
    """Plain attention: 4 heads, 2 KV heads of 32. `sampling`: the header's values under
    general.sampling; `ends`: tokens that the header names as `eot` or `eom`."""
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(str(path), "llama")
    common(w, layers=layers, e=e, ff=128, heads=4, kv=2, d=32, n_ctx=n_ctx)
    vocabulary(w)
    for name, value in (sampling or {}).items():
        add = w.add_int32 if isinstance(value, int) else w.add_float32
        add(f"general.sampling.{name}", value)
    for name, token in (ends or {}).items():
        w.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    if template:
        w.add_chat_template(template)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * 8)
    for i in range(layers):
        _attention(w, rng, i, e, 4, 2, 32)
        _ffn(w, rng, i, e, 128)
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, e))
    return finish(w, path)


def write_sliding(
    path: Path, *, window: int = 32, seed: int = 1, template: str | None = None
) -> Path:
    """Gemma-3-shaped: every sixth layer has full attention, the others a sliding window."""
    rng = np.random.default_rng(seed)
    e, d, layers = 64, 32, 6
    w = gguf.GGUFWriter(str(path), "gemma3")
    common(w, layers=layers, e=e, ff=128, heads=4, kv=1, d=d, n_ctx=4096)
    w.add_sliding_window(window)
    w.add_rope_freq_base(1_000_000.0)
    vocabulary(w)
    if template:
        w.add_chat_template(template)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * 8)
    for i in range(layers):
        _attention(w, rng, i, e, 4, 1, d)
        w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(d, dtype=np.float32))
        w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(d, dtype=np.float32))
        w.add_tensor(f"blk.{i}.post_attention_norm.weight", np.ones(e, dtype=np.float32))
        _ffn(w, rng, i, e, 128)
        w.add_tensor(f"blk.{i}.post_ffw_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    return finish(w, path)


def write_hybrid(path: Path, *, seed: int = 2) -> Path:
    """LFM2-shaped: short-convolution layers (fixed state) with one attention layer between them."""
    rng = np.random.default_rng(seed)
    e, d, kv, l_cache = 64, 16, 2, 3
    attention = [False, False, True, False]
    w = gguf.GGUFWriter(str(path), "lfm2")
    common(
        w,
        layers=len(attention),
        e=e,
        ff=128,
        heads=4,
        kv=[kv if a else 0 for a in attention],
        d=d,
        n_ctx=4096,
    )
    w.add_shortconv_l_cache(l_cache)
    vocabulary(w)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * 8)
    w.add_tensor("token_embd_norm.weight", np.ones(e, dtype=np.float32))
    for i, is_attention in enumerate(attention):
        if is_attention:
            _attention(w, rng, i, e, 4, kv, d)
            w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(d, dtype=np.float32))
            w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(d, dtype=np.float32))
        else:
            w.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(e, dtype=np.float32))
            w.add_tensor(f"blk.{i}.shortconv.conv.weight", _random(rng, e, l_cache))
            w.add_tensor(f"blk.{i}.shortconv.in_proj.weight", _random(rng, 3 * e, e))
            w.add_tensor(f"blk.{i}.shortconv.out_proj.weight", _random(rng, e, e))
        _ffn(w, rng, i, e, 128)
    return finish(w, path)


def write_moe(path: Path, *, seed: int = 3, experts: int = 8, used: int = 2) -> Path:
    """Qwen3-MoE-shaped: every layer routes each token to 2 of 8 experts."""
    rng = np.random.default_rng(seed)
    e, d, ff, layers = 64, 32, 64, 2
    w = gguf.GGUFWriter(str(path), "qwen3moe")
    common(w, layers=layers, e=e, ff=128, heads=4, kv=2, d=d, n_ctx=4096)
    w.add_expert_count(experts)
    w.add_expert_used_count(used)
    w.add_expert_feed_forward_length(ff)
    vocabulary(w)
    w.add_tensor("token_embd.weight", _random(rng, VOCAB, e) * 8)
    for i in range(layers):
        _attention(w, rng, i, e, 4, 2, d)
        w.add_tensor(f"blk.{i}.attn_q_norm.weight", np.ones(d, dtype=np.float32))
        w.add_tensor(f"blk.{i}.attn_k_norm.weight", np.ones(d, dtype=np.float32))
        w.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(e, dtype=np.float32))
        w.add_tensor(f"blk.{i}.ffn_gate_inp.weight", _random(rng, experts, e))
        w.add_tensor(f"blk.{i}.ffn_gate_exps.weight", _random(rng, experts, ff, e))
        w.add_tensor(f"blk.{i}.ffn_up_exps.weight", _random(rng, experts, ff, e))
        w.add_tensor(f"blk.{i}.ffn_down_exps.weight", _random(rng, experts, e, ff))
    w.add_tensor("output_norm.weight", np.ones(e, dtype=np.float32))
    w.add_tensor("output.weight", _random(rng, VOCAB, e))
    return finish(w, path)
