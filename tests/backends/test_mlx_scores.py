"""The planned memory of MLX's attention scores, compared with the peak that MLX reports."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from localllm.planner.attention_scores import scores_bytes
from localllm.planner.types import RunSettings
from localllm_backends.mlx import backend_type
from localllm_catalog import catalog

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.skipif(backend_type.available() is not None, reason=str(backend_type.available())),
]

WIDTH, HEADS, LAYERS = 256, 4, 2


def peaks(step: int, depths: list[int]) -> list[int]:
    """Return the peak bytes of mlx-lm's gemma 3 above the memory held before, for a step that ends
    at each depth."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.models.gemma3_text import Model, ModelArgs

    model = Model(
        ModelArgs(
            model_type="gemma3_text", hidden_size=64, num_hidden_layers=LAYERS,
            intermediate_size=64, head_dim=WIDTH,
            num_attention_heads=HEADS, num_key_value_heads=1, vocab_size=64, sliding_window=64,
            sliding_window_pattern=1,
        )
    )  # fmt: skip
    model.update(tree_map(lambda x: x.astype(mx.bfloat16), model.parameters()))
    caches: list[Any] = make_prompt_cache(model)
    found = []
    for depth in range(step, max(depths) + 1, step):
        mx.clear_cache()
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        model(mx.zeros((1, step), dtype=mx.int32), cache=caches)
        mx.eval([part for cache in caches for part in cache.state])
        if depth in depths:
            found.append(mx.get_peak_memory() - held)
    return found


@pytest.mark.parametrize("step", [pytest.param(128, marks=pytest.mark.long), 512])
def test_scores_grow_with_the_depth_as_planned(step: int) -> None:
    model = next(m for m in catalog.load().models if m.id == "gemma-3-270m-it")
    full = next(layer for layer in model.layers if layer.kind == "full")
    model = dataclasses.replace(model, layers=(full,) * LAYERS, n_heads=HEADS)
    assert full.mixer.quantised_separately == (WIDTH, WIDTH)
    depths = [1024, 4096]
    shallow, deep = (scores_bytes(model, RunSettings(n, n_batch=step), ()) for n in depths)
    # While caches grow, one step holds each layer's old keys and values in addition to the new
    # ones.
    grown = LAYERS * 2 * WIDTH * 2 * (depths[1] - depths[0])
    least = 0.95 * (deep - shallow)
    most = 1.05 * (deep - shallow) + grown
    for _ in range(5):
        first, last = peaks(step, depths)
        if least <= last - first <= most:
            break  # with other work, buffers are freed sooner or later, which moves the peak
    assert least <= last - first <= most


def test_the_declared_score_limit_equals_that_of_one_attention_call() -> None:
    from localllm_backends.mlx.stepping import SCORES_AT_ONCE

    assert backend_type.declaration.scores_at_once == SCORES_AT_ONCE // 4
