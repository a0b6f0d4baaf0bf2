"""Bytes of the KV cache and the recurrent state, layer by layer, on llama.cpp and MLX.

The rules are llama.cpp's own (https://github.com/ggml-org/llama.cpp: src/llama-kv-cache.cpp,
llama-kv-cache-iswa.cpp, llama-memory-recurrent.cpp). They match its planner to the byte (memory.py
describes the check). MLX follows mlx-lm's cache (https://github.com/ml-explore/mlx-lm,
mlx_lm/models/cache.py).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache
from itertools import chain

from localllm.planner.bytes_per_token import facts
from localllm.planner.types import RunSettings
from localllm_backends import registry
from localllm_backends.declaration import Declaration
from localllm_catalog import quants
from localllm_catalog.layers.mixer import CacheLayout
from localllm_catalog.types import Model

# llama.cpp pads every context to this many cells; mlx-lm grows its cache by as many tokens
CONTEXT_STEP = 256
F32 = 4
F16 = 2
# mx.quantize stores a 16-bit scale and a 16-bit bias with each group of 64 values. The group has 32
# values if 64 does not divide the width.
_MLX_KV_BITS = {"q8_0": 8, "q6_0": 6, "q5_0": 5, "q4_0": 4, "q3_0": 3, "q2_0": 2}
# TurboQuant stores a head's vector in words of 32 bits, and its norm in 16 bits.
_MLX_TURBO_BITS = {"turbo4": 4, "turbo3": 3, "turbo2": 2}
_WORD_BITS = 32
_NORM_BYTES = 2
_MLX_GROUPS = (64, 32)
_MLX_GROUP_EXTRA_BYTES = 4
# Elements that llama.cpp quantises as one block.
_QUANT_BLOCK = 32


def pad(n: int, step: int = CONTEXT_STEP) -> int:
    """Return `n` rounded up to a multiple of `step`."""
    return -(-n // step) * step


@lru_cache(4096)
def layout(settings: RunSettings) -> CacheLayout:
    """Return how llama.cpp lays out the caches of a run."""
    return CacheLayout(
        n_ctx=pad(settings.n_ctx),
        n_sequences=settings.n_sequences,
        n_batch=settings.n_batch,
        step=CONTEXT_STEP,
        one_each=True,
    )


def layer_kv_bytes(model: Model, settings: RunSettings) -> list[int]:
    """Return the bytes of each layer's KV, in the order of the layers."""
    # keyed by identity: equal layers of a model are mostly one object, and hashing is slower
    distinct_layers = {id(layer): layer for layer in model.layers}
    layout_and_widths = (layout(settings), *_element_bytes(settings))
    n_bytes = {
        key: layer.mixer.n_bytes(*layout_and_widths) for key, layer in distinct_layers.items()
    }
    return [n_bytes[id(layer)] for layer in model.layers]


def layer_state_bytes(model: Model, settings: RunSettings) -> list[int]:
    """Return the bytes of each layer's recurrent state, for all sequences."""
    copies = F32 * settings.n_sequences * (1 + settings.n_rewind)
    return [layer.mixer.state_floats * copies for layer in model.layers]


@lru_cache(4096)
def kv_bytes(model: Model, settings: RunSettings) -> int:
    """Return the exact bytes of llama.cpp's KV cache: Σ layers cells × (width_k × bytes_k + width_v
    × bytes_v)."""
    layout_and_widths = (layout(settings), *_element_bytes(settings))
    return sum(
        count * layer.mixer.n_bytes(*layout_and_widths) for layer, count in facts(model).groups
    )


def _element_bytes(settings: RunSettings) -> tuple[Fraction, Fraction]:
    """Return the bytes of one element of K and of V."""
    k = quants.kv_element_bytes(settings.kv_type_k)
    v = quants.kv_element_bytes(settings.kv_type_v)
    return k, v


@lru_cache(4096)
def kv_bytes_per_1k_tokens(model: Model, kv_type: str = "f16") -> int:
    """Return the bytes of 1,024 more tokens of context after all windows are full: the slope of
    memory over context."""
    growing_elements = 0
    for layer, count in facts(model).groups:
        if not layer.mixer.is_bounded:
            growing_elements += count * layer.mixer.elements
    return math.ceil(1024 * growing_elements * quants.kv_element_bytes(kv_type))


def recurrent_bytes(model: Model, settings: RunSettings) -> int:
    """Return the bytes of the recurrent layers' state: float32 per sequence, × (1 + snapshots kept
    for drafting)."""
    return facts(model).recurrent_state_bytes * settings.n_sequences * (1 + settings.n_rewind)


def kv_type_allowed(model: Model, kv_type: str, backend: Declaration = registry.NONE) -> bool:
    """Return whether the model can use this KV type.

    Quantised caches need rows of whole blocks of 32 (llama.cpp refuses others). MLX needs heads of
    whole groups and no sliding windows (mlx-lm's rotating cache has no quantised form).
    """
    if backend.kv_quants == "groups":
        quantised = kv_type in _MLX_KV_BITS or kv_type in _MLX_TURBO_BITS
        return kv_type == "f16" or (quantised and _mlx_group(model) > 0)
    if kv_type in ("f32", "f16", "bf16"):
        return True
    if kv_type in quants.MLX_KV_TYPES:
        return False
    if "/" in kv_type:
        return all(kv_type_allowed(model, part, backend) for part in kv_type.split("/"))
    return _in_quant_blocks(model)


@lru_cache(4096)
def _in_quant_blocks(model: Model) -> bool:
    rows = chain.from_iterable(layer.mixer.row for layer, _ in facts(model).groups)
    return all(width % _QUANT_BLOCK == 0 for width in rows)


def _mlx_group(model: Model) -> int:
    """Return the quantisation group that divides each head of a cache, or 0 if MLX cannot quantise
    the cache."""
    mixers = [layer.mixer for layer, _ in facts(model).groups]
    if any(mixer.is_bounded for mixer in mixers):
        return 0
    common_width = math.gcd(*_mlx_widths(model))
    return next((group for group in _MLX_GROUPS if common_width and common_width % group == 0), 0)


def _mlx_widths(model: Model) -> list[int]:
    """Return the widths of the vectors that MLX quantises: those of each head in a cache."""
    mixers = (layer.mixer for layer, _ in facts(model).groups)
    return list(chain.from_iterable(mixer.quantised_separately for mixer in mixers))


def mlx_element_bytes(model: Model, kv_type: str) -> Fraction:
    """Return the bytes of one cached element in MLX. These are 2 in the model's own 16-bit type,
    else its bits and its group's share. With TurboQuant, they are those of the narrowest head."""
    if kv_type == "f32":
        return Fraction(F32)
    turbo_bits = _MLX_TURBO_BITS.get(kv_type, 0)
    widths = _mlx_widths(model)
    if turbo_bits and widths:
        width = min(widths)
        words = -(-width * turbo_bits // _WORD_BITS)
        return Fraction(words * _WORD_BITS // 8 + _NORM_BYTES, width)
    bits = _MLX_KV_BITS.get(kv_type, 0)
    group = _mlx_group(model)
    if bits and group:
        return Fraction(bits, 8) + Fraction(_MLX_GROUP_EXTRA_BYTES, group)
    return Fraction(F16)


def mlx_kv_bytes(model: Model, settings: RunSettings) -> int:
    """Return the bytes of mlx-lm's caches if the sequences share `n_ctx` tokens. They grow by 256;
    sliding layers rotate within their window."""
    cache_layout = CacheLayout(n_ctx=pad(settings.n_ctx), n_sequences=settings.slots)
    elements = 0
    for layer, count in facts(model).groups:
        elements += count * layer.mixer.cells(cache_layout) * sum(layer.mixer.row)
    return int(elements * mlx_element_bytes(model, settings.kv_type))
