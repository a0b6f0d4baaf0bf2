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
    """The greatest `logits` [rows, k] of some rows with their `ids`, in any order. No other token's is greater. `totals` [rows]: what
    all of a row's tokens weigh together, in e^(logit - greatest); None: not known."""

    ids: Ids
    logits: Rows
    totals: NDArray[np.float64] | None = None


# What to draw where there is only one to be drawn.
_COLD = (1.0, 1.0, math.inf, 0.0, 0.0)
# The best one.
BEST = SampleSpec(0.0, 0, 1.0, 0.0, 0.0)


def unlimited(spec: SampleSpec) -> bool:
    """True where what is drawn hangs on the weight of all tokens, which the few must be told."""
    return spec.temperature > 0 and spec.top_k == 0


def may_decide(spec: SampleSpec | None, n: int) -> bool:
    """False where a token that is chosen so (None: the best one) can't be found among the `n` greatest."""
    if spec is None or not unlimited(spec):
        return spec is None or spec.temperature <= 0 or spec.top_k < n
    return not _changes(spec) and (spec.temperature == 1.0 or spec.top_p < 1.0 or spec.min_p > 0.0)


def _changes(spec: SampleSpec) -> bool:
    return bool(spec.banned or spec.seen or spec.bias or spec.reduced or spec.allowed is not None)


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
        if _changes(spec):
            logits = logits.copy() if logits is top.logits else logits
            logits[i] = _changed(top.ids[i], top.logits[i], spec)
    if all(s.temperature <= 0 for s in specs):
        best = logits.max(axis=1, keepdims=True)
        ids = np.where(logits == best, top.ids, np.int32(0x7FFFFFFF)).min(axis=1)
        return _decided(ids, (best > top.logits.min(axis=1, keepdims=True))[:, 0] & (best < np.inf)[:, 0])
    # Of those with the least logit others may have been left out.
    least = top.logits.min(axis=1, keepdims=True)
    # What is no number, or nothing but forbidden, is not taken.
    with np.errstate(invalid="ignore"):
        return _decided(*_drawn(TopRows(top.ids, logits, top.totals), least, specs))


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


def _drawn(top: TopRows, least: Rows, specs: Seq[SampleSpec]) -> tuple[Ids, NDArray[np.bool_]]:
    """One token of each row, of which only those above `least` have a rank that counts; and whether it is that."""
    n, k = top.logits.shape
    rows = np.arange(n)
    wanted = np.array(
        [
            (s.temperature, s.top_k, s.top_p if s.top_p < 1.0 else math.inf, s.min_p, s.uniform)
            if s.temperature > 0
            else _COLD
            for s in specs
        ]
    )
    temperature, top_k, top_p, min_p, uniform = (wanted[:, i : i + 1] for i in range(5))
    # Ranks are drawn, and the ids of those looked up: sorting ids too took five times as long.
    ranked = np.sort(-top.logits, axis=1)
    np.negative(ranked, out=ranked)
    totals = None
    if any(unlimited(s) for s in specs):
        # What they all weigh together says what the first of them are worth.
        told = [unlimited(s) and not _changes(s) for s in specs]
        totals = np.where(told, top.totals if top.totals is not None else 0.0, 0.0)[:, None]
        top_k = np.where(totals > 0, np.count_nonzero(ranked > least, axis=1)[:, None], top_k)
    width = max(1, min(int(top_k.max()), k))
    last = np.clip(top_k, 1, k)[:, 0].astype(np.int64) - 1
    good = (ranked[rows, last] > least[:, 0]) & (ranked[:, 0] < np.inf) & (top_k[:, 0] > 0)
    far = ranked[:, :width].astype(np.float64)
    far -= far[:, :1].copy()
    weights = np.exp(far)
    tempered = np.exp(far / temperature) if (temperature != 1.0).any() else weights
    if last.min() < width - 1:
        limited = np.arange(width) <= last[:, None]
        weights, tempered = weights * limited, tempered * limited
    if (filtered := (top_p < math.inf) | (min_p > 0)).any():
        # As filters.py cuts: the fewest that weigh top_p, of those that weigh min_p of the best.
        summed = np.add.accumulate(weights, axis=1)
        kept = weights >= min_p
        kept[:, 1:] &= summed[:, :-1] < top_p * (
            summed[:, -1:] if totals is None else np.where(totals > 0, totals, summed[:, -1:])
        )
        if totals is not None:
            # Where they leave the last of them they may leave others too.
            good &= ~((totals > 0) & filtered)[:, 0] | ~kept[rows, last]
        tempered = tempered * kept
    reached = np.add.accumulate(tempered, axis=1)
    mass = reached[:, -1:]
    if totals is not None:
        # What the others weigh is known at temperature 1.
        beyond = (totals > 0) & ~filtered
        mass = np.where(beyond, np.maximum(totals, mass), mass)
        good &= ~beyond[:, 0] | ((temperature == 1.0) & (uniform * mass < reached[:, -1:]))[:, 0]
    goal = np.minimum(uniform * mass, np.nextafter(reached[:, -1:], 0.0))
    rank = (reached <= goal).argmin(axis=1)
    drawn = ranked[rows, rank, None]
    hit = top.logits == drawn
    tokens: Ids = top.ids[rows, hit.argmax(axis=1)]
    if np.count_nonzero(hit) > n:
        for i in np.flatnonzero(hit.sum(axis=1) > 1):
            # Equals are ranked by id.
            tokens[i] = np.sort(top.ids[i, hit[i]])[rank[i] - np.count_nonzero(ranked[i] > drawn[i])]
    return tokens, good
