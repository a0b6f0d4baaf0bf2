"""How many bytes the tokens a model has read take, layer by layer: KV cache and recurrent state, on
llama.cpp and MLX.

The rules are llama.cpp's own (https://github.com/ggml-org/llama.cpp: src/llama-kv-cache.cpp,
llama-kv-cache-iswa.cpp, llama-memory-recurrent.cpp) and were checked against its planner (memory.py
says how): to the byte. MLX follows mlx-lm's cache (https://github.com/ml-explore/mlx-lm,
mlx_lm/models/cache.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from itertools import chain

from localllm.planner.streams import facts
from localllm.planner.types import RunSettings
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_catalog import quants, shapes
from localllm_catalog.types import Layer, Model

# llama.cpp pads every context to this many cells; mlx-lm grows its cache by as many tokens
CONTEXT_STEP = 256
F32 = 4
F16 = 2
# mx.quantize stores a 16-bit scale and a 16-bit bias beside each group of 64 values, or of 32 where
# 64 does not divide.
_MLX_KV_BITS = {"q8_0": 8, "q4_0": 4}
_MLX_GROUPS = (64, 32)
_MLX_GROUP_EXTRA_BYTES = 4


def pad(n: int, step: int = CONTEXT_STEP) -> int:
    """`n` rounded up to a multiple of `step`."""
    return -(-n // step) * step


def kv_cells(layer: Layer, settings: RunSettings) -> int:
    """KV cells of one layer: the padded context, or for a sliding layer its window × sequences +
    one micro-batch.

    llama.cpp: PAD(min(n_ctx, n_swa × n_seq_max + n_ubatch), 256) with a unified cache and
    `swa_full` off.
    """
    if layer.kind in ("recurrent", "none") or layer.shares_kv:
        return 0
    if layer.per_sequence:
        alone = replace(settings, slots=1, spare=0)
        return settings.n_sequences * kv_cells(replace(layer, per_sequence=False), alone)
    context = pad(settings.n_ctx)
    if layer.kind == "sliding" and layer.window:
        return min(
            context, pad(min(context, layer.window * settings.n_sequences + settings.n_batch))
        )
    return context


def kv_widths(layer: Layer) -> tuple[int, int]:
    if layer.kind == "mla":
        return layer.mla_rank + layer.mla_rope_dim + layer.index_dim, 0
    return (
        layer.n_kv_heads * layer.head_dim_k + layer.index_dim,
        layer.n_kv_heads * layer.head_dim_v,
    )


def layer_kv_bytes(model: Model, settings: RunSettings) -> list[int]:
    """Bytes of each layer's KV, in the order of the layers."""
    # by identity: equal layers of a model are mostly one object, and hashing takes longer
    unlike = {id(layer): layer for layer in model.layers}
    n_bytes = {key: _kv_bytes_of(layer, settings) for key, layer in unlike.items()}
    return [n_bytes[id(layer)] for layer in model.layers]


def layer_state_bytes(model: Model, settings: RunSettings) -> list[int]:
    """Bytes of each layer's recurrent state, of all sequences together."""
    copies = F32 * settings.n_sequences * (1 + settings.n_rewind)
    return [layer.state_elements * copies for layer in model.layers]


def kv_bytes(model: Model, settings: RunSettings) -> int:
    """Bytes of llama.cpp's KV cache, exactly: Σ layers cells × (width_k × bytes_k + width_v ×
    bytes_v)."""
    return sum(count * _kv_bytes_of(layer, settings) for layer, count in facts(model).groups)


def _kv_bytes_of(layer: Layer, settings: RunSettings) -> int:
    """Bytes of one layer's KV, in whole numbers: fractions cost ten times as long. (Cells come in
    whole blocks of every type.)"""
    cells = kv_cells(layer, settings)
    (width_k, width_v) = kv_widths(layer)
    k = quants.kv_element_bytes(settings.kv_type_k)
    v = quants.kv_element_bytes(settings.kv_type_v)
    both = width_k * k.numerator * v.denominator + width_v * v.numerator * k.denominator
    return cells * both // (k.denominator * v.denominator)


def kv_bytes_per_1k_tokens(model: Model, kv_type: str = "f16") -> int:
    """What 1,024 more tokens of context cost once every window is full: the slope of the memory
    line, in bytes."""
    growing = sum(
        n * shapes.layer_kv_elements(x) for x, n in facts(model).groups if x.kind != "sliding"
    )
    return math.ceil(1024 * growing * quants.kv_element_bytes(kv_type))


def recurrent_bytes(model: Model, settings: RunSettings) -> int:
    """State of the recurrent layers: float32 per sequence, × (1 + snapshots kept for drafting)."""
    return facts(model).recurrent_state_bytes * settings.n_sequences * (1 + settings.n_rewind)


def kv_type_allowed(model: Model, kv_type: str, backend: Declaration = registry.NONE) -> bool:
    """Quantised caches need rows of whole blocks of 32 (llama.cpp refuses others); MLX, heads of
    whole groups and no sliding windows (mlx-lm's rotating cache has no quantised form)."""
    if backend.kv_quants == "groups":
        return kv_type == "f16" or (kv_type in _MLX_KV_BITS and _mlx_group(model) > 0)
    if kv_type in ("f32", "f16", "bf16"):
        return True
    if "/" in kv_type:
        return all(kv_type_allowed(model, part, backend) for part in kv_type.split("/"))
    widths = chain.from_iterable(kv_widths(layer) for layer, _ in facts(model).groups)
    return all(width % 32 == 0 for width in widths)


def _mlx_group(model: Model) -> int:
    """The quantisation group that divides every head of a cache MLX can quantise; 0 where it
    can't."""
    if any(layer.kind == "sliding" for layer, _ in facts(model).groups):
        return 0
    widths: set[int] = set()
    for layer, _ in facts(model).groups:
        if layer.kind == "mla":
            widths |= {layer.mla_rank, layer.mla_rope_dim}
        elif layer.kind == "full" and not layer.shares_kv:
            widths |= {layer.head_dim_k, layer.head_dim_v}
    common = math.gcd(*widths)
    return next((group for group in _MLX_GROUPS if common and common % group == 0), 0)


def mlx_element_bytes(model: Model, kv_type: str) -> Fraction:
    """Bytes one cached element takes in MLX: 2 in the model's own 16-bit type, else its bits and
    its group's share."""
    bits = _MLX_KV_BITS.get(kv_type, 0)
    group = _mlx_group(model)
    if bits and group:
        return Fraction(bits, 8) + Fraction(_MLX_GROUP_EXTRA_BYTES, group)
    return Fraction(F16)


def mlx_kv_bytes(model: Model, settings: RunSettings) -> int:
    """mlx-lm's caches when the sequences share `n_ctx` tokens: grown by 256, sliding layers rotate
    within their window."""
    elements = 0
    context = pad(settings.n_ctx)
    for layer, count in facts(model).groups:
        if layer.kind in ("recurrent", "none") or layer.shares_kv:
            continue
        bounded = layer.kind == "sliding" and layer.window
        if bounded:
            cells = min(context, layer.window * settings.slots)
        else:
            cells = context
        elements += count * cells * sum(kv_widths(layer))
    return int(elements * mlx_element_bytes(model, settings.kv_type))
