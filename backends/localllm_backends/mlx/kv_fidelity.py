"""Compare the KV types of MLX with the model's own type: precision, and speed at load.

Precision: a text is computed with each type, a few tokens at a time. Logit rows are compared.
Speed: on a GPU, a few tokens are decoded with the requested type and with the model's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import mlx.core as mx
import numpy as np

from localllm_backends.contract import KvFidelity, KvType, LoadError
from localllm_backends.logit_losses import Rows, fidelity, log_probabilities, losses
from localllm_backends.mlx.kv_types import shapes_with
from localllm_backends.mlx.layout import arrays_of
from localllm_backends.mlx.sequence_cache import SequenceCache
from localllm_backends.mlx.shapes import Shapes

_PIECE_TOKENS = 16
# A type that takes longer than this multiple of the model's own type is replaced. As for llama.cpp:
# a type with a fast kernel is within 10 %, and one without takes several times as long.
SLOWER_RATIO = 1.5
_DEPTH_TOKENS = 2048
_DECODE_TOKENS = 16


class _Reading:
    """A sequence that is computed with one KV type."""

    def __init__(self, model: Any, shapes: Shapes) -> None:
        self._model = model
        self._seq = SequenceCache(0, shapes.layout)

    def step(self, tokens: Sequence[int]) -> Any:
        """Return the logits after each of these next tokens, float32 [tokens, vocabulary]."""
        logits = self._call(tokens)
        mx.eval(logits, arrays_of(self._seq.leaves))
        return logits[0].astype(mx.float32)

    def read(self, tokens: Sequence[int]) -> None:
        """Compute these next tokens, without logits."""
        self._call(tokens)
        mx.eval(arrays_of(self._seq.leaves))

    def _call(self, tokens: Sequence[int]) -> Any:
        batch = self._seq.batch
        batch.make_room(len(tokens))
        logits = self._model(mx.array([tokens]), cache=batch.caches)
        batch.advance([len(tokens)])
        return logits


def compared(
    model: Any, caches: Sequence[Any], own: Shapes, pairs: Sequence[tuple[str, str]],
    tokens: Sequence[int],
) -> tuple[KvFidelity, ...]:  # fmt: skip
    """Compare each pair (type, type) with the model's `own` KV type over `tokens`.

    Pairs that the model does not support are left out, as are pairs of two different types.
    """
    exact = _Reading(model, own)
    readings: dict[tuple[str, str], _Reading] = {}
    for pair in pairs:
        if pair[0] == pair[1]:
            with suppress(LoadError):
                kind = cast("KvType", pair[0])
                readings[pair] = _Reading(model, shapes_with(model, caches, own, kind))
    found: dict[tuple[str, str], list[Rows]] = {pair: [] for pair in readings}
    for at in range(0, len(tokens), _PIECE_TOKENS):
        piece = tokens[at : at + _PIECE_TOKENS]
        right = log_probabilities(np.array(exact.step(piece)))
        for pair, reading in readings.items():
            near = log_probabilities(np.array(reading.step(piece)))
            found[pair].append(losses(right, near))
    return tuple(fidelity(pair, pieces) for pair, pieces in found.items())


def step_seconds(model: Any, shapes: Shapes, depth: int = _DEPTH_TOKENS) -> float:
    """Return the seconds of the fastest decode step after `depth` tokens with this KV type."""
    reading = _Reading(model, shapes)
    reading.read([0] * depth)
    fastest_s = float("inf")
    for _ in range(_DECODE_TOKENS):
        started_s = time.perf_counter()
        reading.step([0])
        fastest_s = min(fastest_s, time.perf_counter() - started_s)
    return fastest_s


def fast_enough(
    model: Any, own: Shapes, wanted: Shapes,
    seconds: Callable[[Any, Shapes], float] | None = None,
) -> tuple[Shapes, str]:  # fmt: skip
    """Return the KV type to use, and a sentence if `wanted` is too slow here (else "").

    `seconds` times a step with one type. By default, only steps on a GPU are timed: on a CPU, noise
    is larger than the difference of types.
    """
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    if wanted.kv_type == own.kv_type or not (seconds or on_gpu):
        return wanted, ""
    seconds = seconds or step_seconds
    own_s = seconds(model, own)
    wanted_s = seconds(model, wanted)
    if wanted_s <= SLOWER_RATIO * own_s:
        return wanted, ""
    return own, (
        f"KV type {wanted.kv_type} was replaced by {own.kv_type}: with {_DEPTH_TOKENS:,} tokens of "
        f"context it decodes at {1 / wanted_s:.0f} tok/s on this machine, {own.kv_type} at "
        f"{1 / own_s:.0f}"
    )
