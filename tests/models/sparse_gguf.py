"""Write GGUF files with a real model's metadata and tensor table but no weights: sparse files of
the model's size.

llama.cpp plans every buffer from the header alone (`no_alloc`), so such a file shows within
milliseconds how much memory a 70B would need, and takes a few kilobytes of disk. The shapes are the
real models'; the sources are in localllm_catalog.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf

Tensor = tuple[str, tuple[int, ...]]
_SMALL = gguf.GGMLQuantizationType.F32


@dataclass(frozen=True)
class Shape:
    """The dimensions of one model as in its GGUF header. `extra` are keys written under the
    architecture's name."""

    name: str
    arch: str
    n_layers: int
    hidden: int
    ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    n_ctx_train: int = 131072
    experts: int = 0
    experts_used: int = 0
    expert_ff: int = 0
    window: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    kv_heads_per_layer: tuple[int, ...] = ()
    quant: str = "Q4_K"
    expert_quant: str = ""  # if the experts have another one
    # if _LAYERS does not have the architecture
    layers: Callable[[Shape], Iterator[Tensor]] | None = None


def _qkv(s: Shape, i: int, *, norms: bool = False, bias: bool = False) -> Iterator[Tensor]:
    p = f"blk.{i}."
    kv = (s.kv_heads_per_layer[i] if s.kv_heads_per_layer else s.n_kv_heads) * s.head_dim
    yield p + "attn_norm.weight", (s.hidden,)
    yield p + "attn_q.weight", (s.hidden, s.n_heads * s.head_dim)
    yield p + "attn_k.weight", (s.hidden, kv)
    yield p + "attn_v.weight", (s.hidden, kv)
    yield p + "attn_output.weight", (s.n_heads * s.head_dim, s.hidden)
    if norms:
        yield p + "attn_q_norm.weight", (s.head_dim,)
        yield p + "attn_k_norm.weight", (s.head_dim,)
    if bias:
        yield p + "attn_q.bias", (s.n_heads * s.head_dim,)
        yield p + "attn_k.bias", (kv,)
        yield p + "attn_v.bias", (kv,)
        yield p + "attn_output.bias", (s.hidden,)


def _ffn(s: Shape, i: int, norm: str = "ffn_norm") -> Iterator[Tensor]:
    p = f"blk.{i}."
    yield p + norm + ".weight", (s.hidden,)
    yield p + "ffn_gate.weight", (s.hidden, s.ff)
    yield p + "ffn_up.weight", (s.hidden, s.ff)
    yield p + "ffn_down.weight", (s.ff, s.hidden)


def _moe(s: Shape, i: int, norm: str = "ffn_norm", *, bias: bool = False) -> Iterator[Tensor]:
    p = f"blk.{i}."
    yield p + norm + ".weight", (s.hidden,)
    yield p + "ffn_gate_inp.weight", (s.hidden, s.experts)
    yield p + "ffn_gate_exps.weight", (s.hidden, s.expert_ff, s.experts)
    yield p + "ffn_up_exps.weight", (s.hidden, s.expert_ff, s.experts)
    yield p + "ffn_down_exps.weight", (s.expert_ff, s.hidden, s.experts)
    if bias:
        yield p + "ffn_gate_inp.bias", (s.experts,)
        yield p + "ffn_gate_exps.bias", (s.expert_ff, s.experts)
        yield p + "ffn_up_exps.bias", (s.expert_ff, s.experts)
        yield p + "ffn_down_exps.bias", (s.hidden, s.experts)


def _llama(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i)
        yield from _ffn(s, i)


def _qwen3(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i, norms=True)
        yield from _ffn(s, i)


def _qwen3moe(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i, norms=True)
        yield from _moe(s, i)


def _gemma3(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i, norms=True)
        yield f"blk.{i}.post_attention_norm.weight", (s.hidden,)
        yield from _ffn(s, i)
        yield f"blk.{i}.post_ffw_norm.weight", (s.hidden,)


def _gemma2(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i)
        yield f"blk.{i}.post_attention_norm.weight", (s.hidden,)
        yield from _ffn(s, i)
        yield f"blk.{i}.post_ffw_norm.weight", (s.hidden,)


def _gpt_oss(s: Shape) -> Iterator[Tensor]:
    for i in range(s.n_layers):
        yield from _qkv(s, i, bias=True)
        yield f"blk.{i}.attn_sinks.weight", (s.n_heads,)
        yield from _moe(s, i, norm="post_attention_norm", bias=True)


def _deepseek2(s: Shape) -> Iterator[Tensor]:
    rank, rope = int(s.extra["attention.kv_lora_rank"]), int(s.extra["rope.dimension_count"])
    dk, dv = int(s.extra["attention.key_length_mla"]), int(s.extra["attention.value_length_mla"])
    q_rank = int(s.extra.get("attention.q_lora_rank", 0))
    shared = int(s.extra.get("expert_shared_count", 0))
    for i in range(s.n_layers):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", (s.hidden,)
        if q_rank:
            yield p + "attn_q_a_norm.weight", (q_rank,)
            yield p + "attn_q_a.weight", (s.hidden, q_rank)
            yield p + "attn_q_b.weight", (q_rank, s.n_heads * dk)
        else:
            yield p + "attn_q.weight", (s.hidden, s.n_heads * dk)
        yield p + "attn_kv_a_norm.weight", (rank,)
        yield p + "attn_kv_a_mqa.weight", (s.hidden, rank + rope)
        yield p + "attn_k_b.weight", (dk - rope, rank, s.n_heads)
        yield p + "attn_v_b.weight", (rank, dv, s.n_heads)
        yield p + "attn_output.weight", (s.n_heads * dv, s.hidden)
        if i < int(s.extra["leading_dense_block_count"]):
            yield from _ffn(s, i)
        else:
            yield from _moe(s, i)
            yield p + "ffn_gate_shexp.weight", (s.hidden, s.expert_ff * shared)
            yield p + "ffn_up_shexp.weight", (s.hidden, s.expert_ff * shared)
            yield p + "ffn_down_shexp.weight", (s.expert_ff * shared, s.hidden)


def _qwen35(s: Shape) -> Iterator[Tensor]:
    """Three gated-delta-net layers, then one layer of gated attention (every
    `full_attention_interval`-th)."""
    every = int(s.extra["full_attention_interval"])
    inner, state = int(s.extra["ssm.inner_size"]), int(s.extra["ssm.state_size"])
    groups, ranks, conv = (
        int(s.extra[f"ssm.{k}"]) for k in ("group_count", "time_step_rank", "conv_kernel")
    )
    for i in range(s.n_layers):
        p = f"blk.{i}."
        yield p + "attn_norm.weight", (s.hidden,)
        yield p + "post_attention_norm.weight", (s.hidden,)
        if (i + 1) % every == 0:
            yield p + "attn_q.weight", (s.hidden, s.n_heads * s.head_dim * 2)
            yield p + "attn_k.weight", (s.hidden, s.n_kv_heads * s.head_dim)
            yield p + "attn_v.weight", (s.hidden, s.n_kv_heads * s.head_dim)
            yield p + "attn_output.weight", (s.n_heads * s.head_dim, s.hidden)
            yield p + "attn_q_norm.weight", (s.head_dim,)
            yield p + "attn_k_norm.weight", (s.head_dim,)
        else:
            width = inner + 2 * groups * state
            yield p + "attn_qkv.weight", (s.hidden, width)
            yield p + "attn_gate.weight", (s.hidden, inner)
            yield p + "ssm_conv1d.weight", (conv, width)
            yield p + "ssm_dt.bias", (ranks,)
            yield p + "ssm_a", (ranks,)
            yield p + "ssm_beta.weight", (s.hidden, ranks)
            yield p + "ssm_alpha.weight", (s.hidden, ranks)
            yield p + "ssm_norm.weight", (inner // ranks,)
            yield p + "ssm_out.weight", (inner, s.hidden)
        if s.experts:
            yield from list(_moe(s, i))[1:]
            yield p + "ffn_gate_inp_shexp.weight", (s.hidden,)
            yield p + "ffn_gate_shexp.weight", (s.hidden, s.expert_ff)
            yield p + "ffn_up_shexp.weight", (s.hidden, s.expert_ff)
            yield p + "ffn_down_shexp.weight", (s.expert_ff, s.hidden)
        else:
            yield from list(_ffn(s, i))[1:]


def _qwen4exp(s: Shape) -> Iterator[Tensor]:
    """Qwen3.5's layers with four residual streams, an indexer for full attention, and a table of
    n-grams in layer 2."""
    extra = s.extra
    rank, streams = int(extra["hyper_connection.low_rank"]), int(extra["hyper_connection.count"])
    wide, index = streams * s.hidden, int(extra["attention.indexer.key_length"])
    yield "output_hc_norm.weight", (s.hidden, streams)
    yield "output_hc_down.weight", (wide, rank)
    yield "output_hc_up.weight", (rank, wide)
    yield (
        "per_layer_token_embd.weight",
        (int(extra["embedding_length_per_layer_input"]), sum(extra["ple.head_vocab_sizes"])),
    )
    for name, dims in _qwen35(s):
        if "norm.weight" not in name or name.split(".")[2] in (
            "attn_q_norm",
            "attn_k_norm",
            "ssm_norm",
        ):
            yield name, dims
    for i in range(s.n_layers):
        p = f"blk.{i}."
        for part in ("attn", "ffn"):
            yield p + f"hc_{part}_norm.weight", (s.hidden, streams)
            yield p + f"hc_{part}_down.weight", (wide, rank)
            yield p + f"hc_{part}_up.weight", (rank, wide)
            yield p + f"hc_{part}_inject.weight", (wide, streams)
        if (i + 1) % int(extra["full_attention_interval"]) == 0:
            yield (
                p + "indexer.q_proj.weight",
                (s.hidden, int(extra["attention.indexer.head_count"]) * index),
            )
            yield p + "indexer.k_proj.weight", (s.hidden, index)
            yield p + "indexer.q_norm.weight", (index,)
            yield p + "indexer.k_norm.weight", (index,)
        if i in extra["ple.layers"]:
            yield p + "ple_key.weight", (s.hidden, wide)
            yield p + "ple_value.weight", (s.hidden, s.hidden)
            for part in ("key", "query", "conv"):
                yield p + f"ple_norm_{part}.weight", (s.hidden, streams)
            yield p + "ple_conv1d.weight", (int(extra["ple.conv_kernel"]), wide)


def _lfm2(s: Shape) -> Iterator[Tensor]:
    kernel = int(s.extra["shortconv.l_cache"])
    for i in range(s.n_layers):
        p = f"blk.{i}."
        if s.kv_heads_per_layer[i]:
            yield from _qkv(s, i, norms=True)
        else:
            yield p + "attn_norm.weight", (s.hidden,)
            yield p + "shortconv.conv.weight", (kernel, s.hidden)
            yield p + "shortconv.in_proj.weight", (s.hidden, 3 * s.hidden)
            yield p + "shortconv.out_proj.weight", (s.hidden, s.hidden)
        yield from _ffn(s, i)


_LAYERS: dict[str, Callable[[Shape], Iterator[Tensor]]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "qwen4exp": _qwen4exp,
    "lfm2": _lfm2,
}


def tensors(s: Shape) -> list[Tensor]:
    """Every tensor of `s` with its ggml dimensions (fastest first)."""
    out: list[Tensor] = [("token_embd.weight", (s.hidden, s.vocab))]
    if s.arch != "qwen4exp":
        out.append(
            ("token_embd_norm.weight" if s.arch == "lfm2" else "output_norm.weight", (s.hidden,))
        )
    if not s.tied:
        out.append(("output.weight", (s.hidden, s.vocab)))
    return out + list((s.layers or _LAYERS[s.arch])(s))


def _type_of(s: Shape, name: str, dims: tuple[int, ...]) -> gguf.GGMLQuantizationType:
    if (
        len(dims) == 1
        or "_inp" in name
        or "conv1d" in name
        or "shortconv.conv" in name
        or name.endswith("bias")
    ):
        return _SMALL
    wanted = gguf.GGMLQuantizationType[
        s.expert_quant if s.expert_quant and "_exps." in name else s.quant
    ]
    block = gguf.GGML_QUANT_SIZES[wanted][0]
    return wanted if dims[0] % block == 0 else gguf.GGMLQuantizationType.Q8_0


def write(
    s: Shape, folder: Path, vocabulary: Callable[[gguf.GGUFWriter, int], None] | None = None
) -> Path:
    """Write `s` as a sparse GGUF under `folder` and return its path; an existing file is reused.
    `vocabulary` adds a tokenizer of that many tokens. Without one the file can only be planned, not
    served."""
    path = folder / f"{s.name}.gguf"
    if path.exists():
        return path
    w = gguf.GGUFWriter(str(path), s.arch)
    w.add_uint32("general.quantization_version", 2)
    w.add_context_length(s.n_ctx_train)
    w.add_embedding_length(s.hidden)
    w.add_block_count(s.n_layers)
    w.add_feed_forward_length(s.ff)
    w.add_head_count(s.n_heads)
    w.add_head_count_kv(list(s.kv_heads_per_layer) if s.kv_heads_per_layer else s.n_kv_heads)
    if s.arch != "deepseek2":
        w.add_key_length(s.head_dim)
        w.add_value_length(s.head_dim)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_vocab_size(s.vocab)
    if vocabulary is None:
        w.add_tokenizer_model("none")
    else:
        vocabulary(w, s.vocab)
    if s.experts:
        w.add_expert_count(s.experts)
        w.add_expert_used_count(s.experts_used)
        w.add_expert_feed_forward_length(s.expert_ff)
    if s.window:
        w.add_sliding_window(s.window)
    for key, value in s.extra.items():
        name = f"{s.arch}.{key}"
        if isinstance(value, bool):
            w.add_bool(name, value)
        elif isinstance(value, float):
            w.add_float32(name, value)
        elif isinstance(value, list):
            w.add_array(name, value)
        elif isinstance(value, tuple):
            w.add_key_value(
                name, list(value), gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType.UINT64
            )
        else:
            w.add_uint32(name, value)
    end = 0
    for name, dims in tensors(s):
        kind = _type_of(s, name, dims)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        n = 1
        for d in dims:
            n *= d
        n_bytes = n // block * size
        # The writer takes numpy order (slowest first) of the *byte* shape for quantised tensors.
        rows = tuple(reversed(dims))
        byte_rows = (*rows[:-1], rows[-1] // block * size) if block > 1 else rows
        dtype: Any = "uint8" if block > 1 else "float32"
        import numpy as np

        w.add_tensor_info(
            name, byte_rows, np.dtype(dtype), n_bytes, raw_dtype=kind if block > 1 else None
        )
        end += -(-n_bytes // 32) * 32
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    w.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as f:
        f.truncate(start + end)
    return path


_DEEPSEEK_LITE = {
    "attention.kv_lora_rank": 512,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "rope.dimension_count": 64,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
}
_QWEN35_27B = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 6144,
    "ssm.state_size": 128,
    "ssm.time_step_rank": 48,
    "ssm.group_count": 16,
    "full_attention_interval": 4,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
}
_QWEN35_35B = {
    **_QWEN35_27B,
    "ssm.inner_size": 4096,
    "ssm.time_step_rank": 32,
    "expert_shared_feed_forward_length": 512,
}
_GLM_FLASH = {
    **_DEEPSEEK_LITE,
    "attention.q_lora_rank": 768,
    "attention.key_length_mla": 256,
    "attention.value_length_mla": 256,
    "expert_shared_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.8,
    "leading_dense_block_count": 1,
}
_LFM2_KV = tuple(8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16))

_TABLE_ROWS = 2_000_003
# As wide as Qwen3.8-Flash-Next, but with fewer layers and experts, and with a table of 5.4 GB
# (Q8_0) instead of 28.8 GB.
FLASH_NEXT = Shape(
    "qwen4exp", "qwen4exp", 8, 2560, 640, 24, 2, 256, 248320, n_ctx_train=262144, experts=32,
    experts_used=10, expert_ff=640,
    extra={
        **_QWEN35_27B, "expert_shared_feed_forward_length": 640, "hyper_connection.count": 4,
        "hyper_connection.low_rank": 320, "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512, "ple.layers": [1], "ple.ngram_size": 3,
        "ple.heads_per_ngram": 8,
        "ple.conv_kernel": 4, "ple.eos_token_id": 2, "embedding_length_per_layer_input": 160,
        "ple.layer_multipliers": (3, 5, 7),
        "ple.head_offsets": tuple(i * _TABLE_ROWS for i in range(16)),
        "ple.head_vocab_sizes": (_TABLE_ROWS,) * 16,
    },
)  # fmt: skip

SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("smollm2-135m", "llama", 30, 576, 1536, 9, 3, 64, 49152, tied=True, n_ctx_train=8192),
        Shape("llama-3.1-8b", "llama", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("llama-3.2-1b", "llama", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
        Shape("llama-3.3-70b", "llama", 80, 8192, 28672, 64, 8, 128, 128256),
        Shape("llama-2-7b", "llama", 32, 4096, 11008, 32, 32, 128, 32000, n_ctx_train=4096),
        Shape("mistral-small-24b", "llama", 40, 5120, 32768, 32, 8, 128, 131072),
        Shape("qwen3-0.6b", "qwen3", 28, 1024, 3072, 16, 8, 128, 151936, tied=True),
        Shape("qwen3-8b", "qwen3", 36, 4096, 12288, 32, 8, 128, 151936),
        Shape("qwen3-32b", "qwen3", 64, 5120, 25600, 64, 8, 128, 151936),
        Shape("qwen3-30b-a3b", "qwen3moe", 48, 2048, 6144, 32, 4, 128, 151936, experts=128,
        experts_used=8, expert_ff=768),
        Shape(
            "qwen3-235b-a22b", "qwen3moe", 94, 4096, 12288, 64, 4, 128, 151936,
            experts=128, experts_used=8, expert_ff=1536,
        ),
        Shape("gemma-3-270m", "gemma3", 18, 640, 2048, 4, 1, 256, 262144, tied=True, window=512,
        n_ctx_train=32768),
        Shape("gemma-3-27b", "gemma3", 62, 5376, 21504, 32, 16, 128, 262144, tied=True,
        window=1024),
        Shape(
            "gemma-2-9b", "gemma2", 42, 3584, 14336, 16, 8, 256, 256000, tied=True, window=4096,
            n_ctx_train=8192, extra={"attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0},
        ),
        Shape(
            "gpt-oss-20b", "gpt-oss", 24, 2880, 2880, 64, 8, 64, 201088,
            experts=32, experts_used=4, expert_ff=2880, window=128, quant="Q8_0",
            expert_quant="MXFP4",
        ),
        Shape(
            "gpt-oss-120b", "gpt-oss", 36, 2880, 2880, 64, 8, 64, 201088,
            experts=128, experts_used=4, expert_ff=2880, window=128, quant="Q8_0",
            expert_quant="MXFP4",
        ),
        Shape(
            "deepseek-v2-lite", "deepseek2", 27, 2048, 10944, 16, 1, 192, 102400,
            experts=64, experts_used=6, expert_ff=1408, extra=_DEEPSEEK_LITE,
        ),
        Shape(
            "glm-4.7-flash", "deepseek2", 47, 2048, 10240, 20, 1, 256, 154880,
            experts=64, experts_used=4, expert_ff=1536, extra=_GLM_FLASH,
        ),
        Shape("qwen3.5-27b", "qwen35", 64, 5120, 17408, 24, 4, 256, 248320, n_ctx_train=262144,
        extra=_QWEN35_27B),
        Shape(
            "qwen3.5-35b-a3b", "qwen35moe", 40, 2048, 512, 16, 2, 256, 248320, n_ctx_train=262144,
            experts=256, experts_used=8, expert_ff=512, extra=_QWEN35_35B,
        ),
        Shape(
            "lfm2-1.2b", "lfm2", 16, 2048, 8192, 32, 8, 64, 65536, tied=True, n_ctx_train=128000,
            kv_heads_per_layer=_LFM2_KV, extra={"shortconv.l_cache": 3},
        ),
    )
}  # fmt: skip
