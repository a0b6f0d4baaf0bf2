"""What MLX holds and moves of attention scores while it reads a prompt: by the width of the heads,
the step and the depth."""

from __future__ import annotations

from localllm.planner.streams import facts
from localllm.planner.types import RunSettings
from localllm_catalog.types import Model

_BYTES = 2
# The fewest tokens it computes at once (localllm_backends/mlx/stepping.py).
_MLX_PIECE = 64
# Times that a score goes through memory where no kernel keeps it: written by the product with the
# keys, read, masked and written, read and written by the softmax, read by the product with the
# values.
_PASSES = 6


def scores_bytes(model: Model, settings: RunSettings, fused_heads: tuple[int, ...]) -> int:
    """Bytes of the attention scores that MLX holds for one layer of the deepest step of a prompt,
    with the mask they are under: heads × new tokens × all tokens at 16 bits, where a head's width
    is none of `fused_heads`.

    mlx/fast.cpp, `scaled_dot_product_attention`, its fallback: one matrix, which softmax
    overwrites, and a byte a pair of mask (checked with `mx.get_peak_memory` on the CPU). Latent
    attention hands the scores of its rotated part over as a mask."""
    most = 0
    for layer, _ in facts(model).groups:
        if layer.mixer.is_fused(fused_heads):
            continue
        seen = int(layer.mixer.seen(settings.n_ctx, settings.n_batch))
        pairs = min(settings.n_batch, seen) * seen
        if settings.scores_at_once:
            pairs = min(pairs, max(settings.scores_at_once, _MLX_PIECE * seen))
        most = max(most, pairs)
    return (_BYTES * model.n_heads + 1) * most


def moved_bytes(model: Model, context: float, fused_heads: tuple[int, ...]) -> float:
    """Bytes of scores that one prompt token's attention over `context` tokens moves through memory
    in all layers."""
    moved = 0.0
    for layer, count in facts(model).groups:
        mixer = layer.mixer
        if not mixer.is_fused(fused_heads):
            moved += count * mixer.heads(model.n_heads) * mixer.seen(context)
    return _PASSES * _BYTES * moved
