"""Tokens sampled on the device, so that the next step can begin before anybody here has seen them.

The filters and their order are the contract's (`SampleSpec`). The device computes in single precision and looks at the best 512
tokens only; wherever that could give another token than double precision over all of them, it says that it is unsure
(-1), and the owner samples from the logits. So a seed gives the same tokens wherever they are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from localllm_backends.contract import MAX_SAMPLED_TOP_K, SampleSpec

# A share nearer than this to a limit may lie on its other side: more than single precision errs over a vocabulary.
_NEAR = 2e-5
UNSURE = -1


@dataclass
class DeviceSamples:
    """The tokens sampled by each of `asked`, on their way from the device."""

    tokens: Any
    asked: list[SampleSpec]
    host: list[int] | None = None

    @property
    def readable(self) -> Any:
        """The tokens as a model takes them; any one where it is unsure."""
        return mx.maximum(self.tokens, 0)

    def on_host(self) -> list[int]:
        """The tokens; UNSURE where the logits must be asked."""
        if self.host is None:
            self.host = [int(t) for t in np.array(self.tokens)]
        return self.host


def sample(rows: Any, asked: Seq[SampleSpec]) -> DeviceSamples:
    """Begin sampling one token from each of `rows` (logits [len(asked), n_vocab])."""
    n_vocab = int(rows.shape[-1])
    n = min(MAX_SAMPLED_TOP_K, n_vocab)
    rows = rows.astype(mx.float32)
    if any(d.banned for d in asked):
        at = [(i, token) for i, d in enumerate(asked) for token in d.banned]
        rows[mx.array([i for i, _ in at]), mx.array([token for _, token in at])] = -mx.inf
    ids = mx.argpartition(-rows, n - 1, axis=-1)[:, :n] if n < n_vocab else mx.broadcast_to(mx.arange(n), rows.shape)
    # Equals stand by their ids: a stable sort by logit keeps the order that they are given in.
    ids = mx.sort(ids, axis=-1)
    values = mx.take_along_axis(rows, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids, values = mx.take_along_axis(ids, order, axis=-1), mx.take_along_axis(values, order, axis=-1)

    def column(of: list[float]) -> Any:
        return mx.array(of, dtype=mx.float32)[:, None]

    limited = column([float(0 < d.top_k < n_vocab) for d in asked]) > 0
    top_k = column([float(d.top_k if 0 < d.top_k < n_vocab else n_vocab) for d in asked])
    top_p, min_p = column([d.top_p for d in asked]), column([d.min_p for d in asked])
    temperature, uniform = column([d.temperature for d in asked]), column([d.uniform for d in asked])
    inside = mx.arange(n)[None] < top_k
    keep, unsure = _kept(values, rows, inside, limited, top_p, min_p)
    cut = limited | (top_p < 1.0) | (min_p > 0.0)
    # What would be kept behind the last one looked at.
    unsure = unsure | (keep[:, -1:] & cut & (top_k > n) if n < n_vocab else mx.zeros_like(cut))
    hot = values / temperature
    best = hot[:, :1]
    weights = mx.where(keep, mx.exp(hot - best), 0.0)
    total = mx.where(
        cut, weights.sum(axis=-1, keepdims=True), mx.exp(rows / temperature - best).sum(axis=-1, keepdims=True)
    )
    reached = mx.cumsum(weights / total, axis=-1)
    at = (reached <= uniform).sum(axis=-1, keepdims=True)
    # One token alone is always it: where everything ends is no limit.
    between = keep & (mx.arange(n)[None] < keep.sum(axis=-1, keepdims=True) - 1)
    unsure = unsure | (mx.where(between, mx.abs(reached - uniform), 1.0).min(axis=-1, keepdims=True) < _NEAR)
    beyond = at >= keep.sum(axis=-1, keepdims=True)
    last = mx.minimum(at, keep.sum(axis=-1, keepdims=True) - 1)
    unsure = unsure | (beyond & mx.logical_not(cut) & (uniform < 1.0) if n < n_vocab else mx.zeros_like(beyond))
    unsure = unsure | mx.logical_not(mx.isfinite(total) & (mx.abs(best) < mx.inf))
    token = mx.take_along_axis(ids, last.astype(mx.uint32), axis=-1).astype(mx.int32)
    return DeviceSamples(mx.where(unsure, UNSURE, token)[:, 0], list(asked))


def _kept(values: Any, rows: Any, inside: Any, limited: Any, top_p: Any, min_p: Any) -> tuple[Any, Any]:
    """Which of the ranked `values` top_k, top_p and min_p leave, and whether that is unsure."""
    best = values[:, :1]
    weights = mx.where(inside, mx.exp(values - best), 0.0)
    total = mx.where(limited, weights.sum(axis=-1, keepdims=True), mx.exp(rows - best).sum(axis=-1, keepdims=True))
    share = weights / total
    reached = mx.cumsum(share, axis=-1)
    first = mx.arange(values.shape[-1])[None] == 0
    whole = top_p >= 1.0
    keep = inside & (values > -mx.inf) & (whole | (reached - share < top_p)) & (share >= min_p * share[:, :1])
    close = (mx.abs(reached - top_p) < _NEAR) & inside & mx.logical_not(whole) & (share > 0)
    close = close | (
        (mx.abs(share - min_p * share[:, :1]) < _NEAR * share[:, :1]) & (min_p > 0) & mx.logical_not(first)
    )
    return keep | first, close.any(axis=-1, keepdims=True)
