"""Attention scores that MLX holds and moves during prefill, by head width, step and depth."""

from __future__ import annotations

from localllm.planner.bytes_per_token import facts
from localllm.planner.types import RunSettings
from localllm_catalog.types import Model

_SCORE_BYTES = 2
# The fewest tokens that our MLX backend computes at once (localllm_backends/mlx/stepping.py).
_MLX_MIN_CHUNK = 64
# How often a score passes through memory without a fused kernel. The product with the keys writes
# it. Masking and softmax each read and write it. The product with the values reads it.
_PASSES = 6


def scores_bytes(model: Model, settings: RunSettings, fused_heads: tuple[int, ...]) -> int:
    """Return the bytes of the attention scores and their mask that MLX holds for one layer in the
    deepest step of a prompt.

    The scores are heads × new tokens × all tokens at 16 bits, if the head width is not in
    `fused_heads`. The source is the fallback of `scaled_dot_product_attention` in mlx/fast.cpp. It
    has one matrix, which softmax overwrites, and a mask of one byte per pair. (Checked with
    `mx.get_peak_memory` on the CPU.) Latent attention passes the scores of its rotated part as a
    mask.
    """
    largest_pairs = 0
    for layer, _ in facts(model).groups:
        if layer.mixer.is_fused(fused_heads):
            continue
        n_seen = int(layer.mixer.seen(settings.n_ctx, settings.n_batch))
        n_pairs = min(settings.n_batch, n_seen) * n_seen
        if settings.scores_at_once:
            n_pairs = min(n_pairs, max(settings.scores_at_once, _MLX_MIN_CHUNK * n_seen))
        largest_pairs = max(largest_pairs, n_pairs)
    return (_SCORE_BYTES * model.n_heads + 1) * largest_pairs


def moved_bytes(model: Model, context: float, fused_heads: tuple[int, ...]) -> float:
    """Return the bytes of attention scores that one prompt token moves through memory in all
    layers.

    `context` is the number of tokens that its attention covers.
    """
    n_scores = 0.0
    for layer, count in facts(model).groups:
        mixer = layer.mixer
        if not mixer.is_fused(fused_heads):
            n_scores += count * mixer.heads(model.n_heads) * mixer.seen(context)
    return _PASSES * _SCORE_BYTES * n_scores
