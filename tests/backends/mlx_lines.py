"""Token sequences for an MLX backend, and the logits after them."""

from __future__ import annotations

from typing import Any

import numpy as np

from localllm_backends.contract import Chunk

NOISE = 2e-2


def line(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 250, n)]


def start(backend: Any, tokens: list[int]) -> tuple[int, Any]:
    sequence = backend.new_sequence()
    for i in range(0, len(tokens), backend.info.n_batch):
        result = backend.step([Chunk(sequence, tokens[i : i + backend.info.n_batch])])
    return sequence, result


def alone(backend: Any, tokens: list[int]) -> np.ndarray:
    """Return the logits after `tokens`, computed in a sequence of their own."""
    sequence, result = start(backend, tokens)
    row = result.logits(0)[-1].copy()
    backend.drop(sequence)
    return row  # type: ignore[no-any-return]


def assert_same(a: np.ndarray, b: np.ndarray) -> None:
    assert np.abs(a - b).max() <= NOISE * max(1.0, float(np.abs(a).max()))
