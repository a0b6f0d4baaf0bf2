"""Headers of two mixtures that store more, or less, than a latent row per token: GLM-5.3-Flash and
DeepSeek V4 Flash.

They are as wide as the models, with fewer layers and experts. Tensors:
https://github.com/ggml-org/llama.cpp src/models/{glm5-next,deepseek4}.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.sparse_gguf import Shape, Tensor

STREAMS, MIXES = 4, 24


def _streams(p: str, hidden: int) -> Iterator[Tensor]:
    for part in ("attn", "ffn"):
        yield p + f"hc_{part}_fn.weight", (STREAMS * hidden, MIXES)
        yield p + f"hc_{part}_base.weight", (MIXES,)
        yield p + f"hc_{part}_scale.weight", (3,)


def _experts(s: Shape, p: str) -> Iterator[Tensor]:
    yield p + "ffn_norm.weight", (s.hidden,)
    yield p + "ffn_gate_inp.weight", (s.hidden, s.experts)
    for name, dims in (
        ("gate", (s.hidden, s.expert_ff)),
        ("up", (s.hidden, s.expert_ff)),
        ("down", (s.expert_ff, s.hidden)),
    ):
        yield p + f"ffn_{name}_exps.weight", (*dims, s.experts)
        yield p + f"ffn_{name}_shexp.weight", dims


def glm5_next(s: Shape) -> Iterator[Tensor]:
    """Three layers of Kimi delta attention, then one of latent attention with a pooled indexer."""
    x, q_rank, rank, inner, wide = s.hidden, 1536, 512, s.n_heads * 128, s.n_heads * 256
    for i in range(s.n_layers):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", (x,)
        yield from _streams(p, x)
        if s.kv_heads_per_layer[i] == 0:
            for part in "qkv":
                yield p + f"ssm_conv1d_{part}.weight", (4, 1, inner)
                yield p + f"attn_{part}.weight", (x, inner)
            for part in "fg":
                yield p + f"ssm_{part}_a.weight", (x, 128)
                yield p + f"ssm_{part}_b.weight", (128, inner)
            yield p + "ssm_beta.weight", (x, s.n_heads)
            yield p + "ssm_a", (s.n_heads,)
            yield p + "ssm_dt.bias", (inner,)
            yield p + "ssm_norm.weight", (128,)
            yield p + "attn_output.weight", (inner, x)
        else:
            yield p + "attn_q_a_norm.weight", (q_rank,)
            yield p + "attn_kv_a_norm.weight", (rank,)
            yield p + "attn_q_a.weight", (x, q_rank)
            yield p + "attn_q_b.weight", (q_rank, wide)
            yield p + "attn_kv_a_mqa.weight", (x, rank)
            yield p + "attn_k_b.weight", (256, rank, s.n_heads)
            yield p + "attn_v_b.weight", (rank, 256, s.n_heads)
            yield p + "attn_output.weight", (wide, x)
            yield p + "indexer.k_norm.weight", (128,)
            yield p + "indexer.k_norm.bias", (128,)
            yield p + "indexer.proj.weight", (x, 32)
            yield p + "indexer.attn_k.weight", (x, 128)
            yield p + "indexer.attn_q_b.weight", (q_rank, 32 * 128)
            yield p + "indexer_compressor_gate.weight", (x, 128)
            yield p + "indexer_compressor_ape.weight", (128, 4)
        yield from _experts(s, p)
        yield p + "exp_probs_b.bias", (s.experts,)


def deepseek4(s: Shape) -> Iterator[Tensor]:
    """Latent rows of every 4th or 128th token, and rows of each of the last 128 tokens."""
    x, row, q_rank, out_rank, groups, key = s.hidden, s.head_dim, 1024, 1024, 8, 128
    yield "output_hc_fn.weight", (STREAMS * x, STREAMS)
    yield "output_hc_base.weight", (STREAMS,)
    yield "output_hc_scale.weight", (1,)
    for i, ratio in enumerate(s.extra["attention.compress_ratios"]):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", (x,)
        yield p + "attn_sinks.weight", (s.n_heads,)
        yield p + "attn_q_a.weight", (x, q_rank)
        yield p + "attn_q_a_norm.weight", (q_rank,)
        yield p + "attn_q_b.weight", (q_rank, s.n_heads * row)
        yield p + "attn_kv.weight", (x, row)
        yield p + "attn_kv_a_norm.weight", (row,)
        yield p + "attn_output_a.weight", (s.n_heads * row // groups, out_rank * groups)
        yield p + "attn_output_b.weight", (out_rank * groups, x)
        yield from _streams(p, x)
        if ratio:
            overlap = 2 if ratio == 4 else 1
            yield p + "attn_compressor_kv.weight", (x, overlap * row)
            yield p + "attn_compressor_gate.weight", (x, overlap * row)
            yield p + "attn_compressor_ape.weight", (overlap * row, ratio)
            yield p + "attn_compressor_norm.weight", (row,)
        if ratio == 4:
            yield p + "indexer.proj.weight", (x, 64)
            yield p + "indexer.attn_q_b.weight", (q_rank, 64 * key)
            yield p + "indexer_compressor_kv.weight", (x, 2 * key)
            yield p + "indexer_compressor_gate.weight", (x, 2 * key)
            yield p + "indexer_compressor_ape.weight", (2 * key, ratio)
            yield p + "indexer_compressor_norm.weight", (key,)
        yield from _experts(s, p)
        yield p + "exp_probs_b.bias", (s.experts,)


_SHARED: dict[str, Any] = {
    "expert_shared_count": 1,
    "expert_weights_norm": True,
    "hyper_connection.count": STREAMS,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "attention.indexer.key_length": 128,
}
_KV = (0, 0, 0, 1) * 2
GLM_FLASH_NEXT = Shape(
    "glm-5.3-flash", "glm5-next", 8, 4096, 12288, 64, 1, 512, 154880, n_ctx_train=1048576,
    experts=32, experts_used=8,
    expert_ff=2048, kv_heads_per_layer=_KV, layers=glm5_next,
    extra={
        **_SHARED, "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512,
        "attention.key_length_mla": 256,
        "attention.value_length_mla": 256, "rope.dimension_count": 0, "ssm.conv_kernel": 4,
        "kda.head_dim": 128,
        "kda.gate_lower_bound": -5.0, "attention.indexer.head_count": 32,
        "attention.indexer.top_k": 2048,
        "attention.indexer.kpool": 4, "expert_gating_func": 2, "expert_weights_scale": 2.5,
    },
)  # fmt: skip
DEEPSEEK_FLASH = Shape(
    "deepseek-v4-flash", "deepseek4", 6, 4096, 0, 64, 1, 512, 129280, n_ctx_train=1048576,
    experts=32, experts_used=6,
    expert_ff=2048, window=128, layers=deepseek4,
    extra={
        **_SHARED, "attention.q_lora_rank": 1024, "attention.output_lora_rank": 1024,
        "attention.output_group_count": 8,
        "attention.compress_ratios": [0, 0, 4, 128, 4, 128],
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": 64, "attention.indexer.head_count": 64,
        "attention.indexer.top_k": 512,
        "hash_layer_count": 0, "expert_gating_func": 4, "expert_weights_scale": 1.5,
        "swiglu_clamp_exp": 10.0,
    },
)  # fmt: skip
