"""Gemma 4's shapes as sparse GGUF files: heads of two sizes, keys that are also values, shared KV,
tables per layer, experts in addition to a dense feed-forward. (Tensors and keys as llama.cpp's
gemma4 loader reads them; dimensions from the catalog.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from models.sparse_gguf import Shape, Tensor

_FULL, _SLIDING = 512, 256  # head size of full attention and of sliding windows


def _is_full(i: int) -> bool:
    return i % 6 == 5


def _layers(s: Shape) -> Iterator[Tensor]:
    table = int(s.extra["embedding_length_per_layer_input"])
    if table:
        yield "per_layer_token_embd.weight", (table * s.n_layers, s.vocab)
        yield "per_layer_model_proj.weight", (s.hidden, table * s.n_layers)
        yield "per_layer_proj_norm.weight", (table,)
    yield "rope_freqs.weight", (_FULL // 2,)
    for i in range(s.n_layers):
        yield from _attention(s, i)
        p = f"blk.{i}."
        yield p + "ffn_norm.weight", (s.hidden,)
        yield p + "ffn_gate.weight", (s.hidden, s.ff)
        yield p + "ffn_up.weight", (s.hidden, s.ff)
        yield p + "ffn_down.weight", (s.ff, s.hidden)
        yield p + "post_ffw_norm.weight", (s.hidden,)
        if s.experts:
            yield p + "ffn_gate_inp.weight", (s.hidden, s.experts)
            yield p + "ffn_gate_inp.scale", (s.hidden,)
            for norm in ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
                yield p + norm + ".weight", (s.hidden,)
            yield p + "ffn_gate_up_exps.weight", (s.hidden, 2 * s.expert_ff, s.experts)
            yield p + "ffn_down_exps.weight", (s.expert_ff, s.hidden, s.experts)
            yield p + "ffn_down_exps.scale", (s.experts,)
        if table:
            yield p + "inp_gate.weight", (s.hidden, table)
            yield p + "proj.weight", (table, s.hidden)
            yield p + "post_norm.weight", (s.hidden,)
        yield p + "layer_output_scale.weight", (1,)


def _attention(s: Shape, i: int) -> Iterator[Tensor]:
    p, size = f"blk.{i}.", _FULL if _is_full(i) else _SLIDING
    kv = s.kv_heads_per_layer[i] * size
    yield p + "attn_norm.weight", (s.hidden,)
    yield p + "attn_q.weight", (s.hidden, s.n_heads * size)
    yield p + "attn_output.weight", (s.n_heads * size, s.hidden)
    yield p + "attn_q_norm.weight", (size,)
    yield p + "post_attention_norm.weight", (s.hidden,)
    if i < s.n_layers - int(s.extra["attention.shared_kv_layers"]):
        yield p + "attn_k.weight", (s.hidden, kv)
        yield p + "attn_k_norm.weight", (size,)
        # in full-attention layers the keys may also be the values
        if not (_is_full(i) and s.n_kv_heads != s.kv_heads_per_layer[i]):
            yield p + "attn_v.weight", (s.hidden, kv)


def _shape(
    name: str,
    n_layers: int,
    hidden: int,
    ff: int,
    heads: tuple[int, int, int],
    window: int,
    **more: Any,
) -> Shape:
    """`heads`: of queries, of keys within the window, and of keys with full attention."""
    n_heads, sliding, full = heads
    extra: dict[str, Any] = {
        "attention.key_length_swa": _SLIDING, "attention.value_length_swa": _SLIDING,
        "attention.sliding_window_pattern": [not _is_full(i) for i in range(n_layers)],
        "attention.shared_kv_layers": more.pop("shared", 0),
        "embedding_length_per_layer_input": more.pop("table", 0),
        "rope.dimension_count": _FULL, "rope.dimension_count_swa": _SLIDING, "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0,
    }  # fmt: skip
    return Shape(
        name, "gemma4", n_layers, hidden, ff, n_heads, sliding, _FULL, 262144, tied=True,
        n_ctx_train=131072, window=window,
        kv_heads_per_layer=tuple(full if _is_full(i) else sliding for i in range(n_layers)),
        extra=extra, layers=_layers, **more,
    )  # fmt: skip


SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        _shape(
            "gemma-4-26b-a4b",
            30,
            2816,
            2112,
            (16, 8, 2),
            1024,
            experts=128,
            experts_used=8,
            expert_ff=704,
        ),
        _shape("gemma-4-12b", 48, 3840, 15360, (16, 8, 1), 1024),
        _shape("gemma-4-e4b", 42, 2560, 10240, (8, 2, 2), 512, shared=18, table=256),
    )
}
