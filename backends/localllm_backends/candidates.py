"""Choosing among the few greatest logits that a device sorted out of each row, all rows at once, as the engine's sampler would.

The arithmetic is double precision and in the engine's own order (rank), so that a seed draws the same token here and there. What
the few can't decide is left open: somebody then looks at the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm_backends.values import Chunk, SampleSpec

Ids = NDArray[np.int32]
Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The greatest `logits` [rows, k] of some rows with their `ids`, in any order. No other token's is greater."""

    ids: Ids
    logits: Rows

    def ranked(self, n: int) -> TopRows:
        """The `n` greatest, greatest first and equals by id."""
        order = (-self.logits).argsort(axis=1)[:, : n + 1]
        rows = np.arange(len(order))[:, None]
        logits = self.logits[rows, order]
        if (logits[:, 1:] == logits[:, :-1]).any():
            order = np.lexsort((self.ids, -self.logits), axis=1)
            logits = self.logits[rows, order]
        return TopRows(self.ids[rows, order[:, :n]], logits[:, :n])


# What to draw where there is only one to be drawn.
_COLD = (1.0, 1.0, math.inf, 0.0, 0.0)
# The best one.
BEST = SampleSpec(0.0, 0, 1.0, 0.0, 0.0)


def may_decide(spec: SampleSpec | None, n: int) -> bool:
    """False where a token that is chosen so (None: the best one) can't be found among the `n` greatest."""
    return spec is None or spec.temperature <= 0 or 0 < spec.top_k < n


def choose_few(top: TopRows, chunks: Seq[Chunk], where: Seq[int]) -> list[int | None]:
    """For each of the `chunks` the token behind it; None where that is left open, or its number is not in `where`, which says whose
    rows the `top` are."""
    tokens: list[int | None] = [None] * len(chunks)
    if where:
        specs = [chunks[i].sample or BEST for i in where]
        for i, token in zip(where, choose(top, specs), strict=True):
            tokens[i] = token
    return tokens


def choose(top: TopRows, specs: Seq[SampleSpec]) -> list[int | None]:
    """The token of each row as its spec asks, from `top` of that row; None where the few don't decide it."""
    logits = top.logits
    for i, spec in enumerate(specs):
        if spec.banned or spec.seen or spec.bias or spec.reduced or spec.allowed is not None:
            logits = logits.copy() if logits is top.logits else logits
            logits[i] = _changed(top.ids[i], top.logits[i], spec)
    best = logits.max(axis=1, keepdims=True)
    # Of those with the least logit others may have been left out.
    least = top.logits.min(axis=1, keepdims=True)
    good = (best[:, 0] > least[:, 0]) & (best[:, 0] < np.inf)
    if all(s.temperature <= 0 for s in specs):
        ids = np.where(logits == best, top.ids, np.int32(0x7FFFFFFF)).min(axis=1)
        return _decided(ids, good)
    wanted = np.array(
        [
            (s.temperature, s.top_k, s.top_p if s.top_p < 1.0 else math.inf, s.min_p, s.uniform)
            if s.temperature > 0
            else _COLD
            for s in specs
        ]
    )
    top_k = wanted[:, 1]
    good &= top_k > 0
    # What a rank says counts only above that one.
    good &= (logits > least).sum(axis=1) >= top_k
    if not good.any():
        return [None] * len(specs)
    if not good.all():
        # Whatever those are, they are not taken.
        logits, wanted = np.where(good[:, None], logits, np.float32(0)), np.where(good[:, None], wanted, _COLD)
    return _decided(_drawn(TopRows(top.ids, logits), wanted), good)


def _decided(tokens: Ids, good: NDArray[np.bool_]) -> list[int | None]:
    found: list[int | None] = tokens.tolist()
    return found if good.all() else [token if ok else None for token, ok in zip(found, good.tolist(), strict=True)]


def _changed(ids: Ids, logits: Rows, spec: SampleSpec) -> Rows:
    """One row's few as `spec` changes them, -inf where something outside might be greater than them."""
    least, seen, out = logits.min(), spec.seen, logits.copy()
    rises = [added > 0 for amounts in (spec.bias, spec.reduced) if amounts is not None for added in amounts[1:]]
    if any(r.any() for r in rises) or (seen and (seen.repeat < 1.0 or seen.presence < 0.0 or seen.frequency < 0.0)):
        return np.full_like(out, -np.inf)
    if spec.bias is not None:
        hit, at = _found(ids, spec.bias[0])
        out[hit] += spec.bias[1][at]
    if seen is not None and len(seen.ids):
        hit, at = _found(ids, seen.ids)
        counts, was = seen.counts[at].astype(np.float32), out[hit]
        was = np.where(was > 0, was / np.float32(seen.repeat), was * np.float32(seen.repeat))
        out[hit] = was - (counts * np.float32(seen.frequency) + np.float32(seen.presence))
    if spec.reduced is not None:
        hit, at = _found(ids, spec.reduced[0])
        out[hit] += spec.reduced[1][at]
    if spec.allowed is not None:
        out[(spec.allowed[ids >> 3] >> (ids & 7)) & 1 == 0] = -np.inf
    for token in spec.banned:
        out[ids == token] = -np.inf
    # As it is where nothing is left: that is for whoever sees the whole row.
    out[out <= least] = -np.inf
    return out


def _found(ids: Ids, others: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which of `ids` are among `others`, and where there."""
    if not len(others):
        return np.zeros(len(ids), dtype=np.bool_), others
    order = np.argsort(others, kind="stable")
    at = order[np.minimum(np.searchsorted(others, ids, sorter=order), len(others) - 1)]
    hit = others[at] == ids
    return hit, at[hit]


def _drawn(top: TopRows, wanted: NDArray[np.float64]) -> Ids:
    """One token of each row by its (temperature, top_k, top_p, min_p, uniform)."""
    temperature, top_k, top_p, min_p, uniform = (wanted[:, i : i + 1] for i in range(5))
    width = int(top_k.max())
    top = top.ranked(width)
    far = top.logits.astype(np.float64)
    far -= far[:, :1].copy()
    weights, tempered = np.exp(far), np.exp(far / temperature)
    if top_k.min() < width:
        limited = np.arange(width) < top_k
        weights *= limited
        tempered *= limited
    # As filters.py cuts: the fewest that weigh top_p, of those that weigh min_p of the best.
    summed = np.add.accumulate(weights, axis=1)
    kept = weights >= min_p
    kept[:, 1:] &= summed[:, :-1] < top_p * summed[:, -1:]
    tempered *= kept
    reached = np.add.accumulate(tempered, axis=1)
    goal = np.minimum(uniform * reached[:, -1:], np.nextafter(reached[:, -1:], 0.0))
    tokens: Ids = top.ids[np.arange(len(far)), (reached <= goal).argmin(axis=1)]
    return tokens
