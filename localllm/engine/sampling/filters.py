"""The filters: from a row of logits to the tokens that may be drawn, and what each weighs.

The order is llama.cpp's default: top_k, typical_p, top_p, min_p, XTC, temperature. Filters work on
probabilities before temperature, so a high temperature never lets in what the filters kept out.
They mostly end among the few greatest logits, which are ranked and treated in double precision;
where they don't, the rest of the row is passed over in single precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from localllm.engine.messages import Sampling
from localllm.engine.sampling.rejection import Distribution
from localllm.engine.sampling.row import (
    Ids,
    Row,
    Top,
    Values,
    base_of,
    block_sums,
    buffer,
    fewest,
    token_at,
    weigh,
)
from localllm_backends.contract import MAX_SAMPLED_TOP_K

# So many of the greatest are ranked where top_k does not say: what a backend draws is among these.
HEAD = MAX_SAMPLED_TOP_K


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn: `ids`, greatest logit first, weigh `weights`; every other token
    what `rest` says, in a buffer that lasts until the next row is filtered (None: nothing)."""

    ids: Ids
    weights: Values
    rest: Row | None = None

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the running sum of weights: the ranked first, then
        the others by id."""
        reached = np.cumsum(self.weights)
        head = float(reached[-1]) if len(reached) else 0.0
        if self.rest is not None:
            sums = block_sums(self.rest)
            behind = float(sums.sum())
            goal = uniform * (head + behind)
            if goal >= head and behind > 0.0:
                return token_at(self.rest, sums, goal - head)
        else:
            goal = uniform * head
        return int(
            self.ids[min(int(np.searchsorted(reached, goal, side="right")), len(self.ids) - 1)]
        )

    def distribution(self) -> Distribution:
        """The same as probabilities."""
        ids = self.ids
        weights = self.weights
        if self.rest is not None:
            others = np.flatnonzero(self.rest)
            ids = np.concatenate([ids, others])
            weights = np.concatenate([weights, self.rest[others].astype(np.float64)])
        return Distribution(ids, weights / weights.sum())


def distribution(row: Row, sampling: Sampling) -> Distribution:
    """The distribution a token is drawn from, after every filter and the temperature (> 0).

    row: float32 [n_vocab], penalised and constrained; -inf is never drawn. Equal logits give an
    equal distribution, order
    included: a seed then draws the same token.
    """
    return candidates(row, sampling).distribution()


def readable(row: Row) -> Row:
    """`row` where what is no number is forbidden, and with infinite logits nothing but those is
    allowed."""
    most = row.max()
    if math.isnan(most):
        row = np.where(np.isnan(row), np.float32(-np.inf), row)
        most = row.max()
    if most == np.inf:
        return np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
    return row


def candidates(row: Row, sampling: Sampling) -> Candidates:
    """What the filters leave of a row, at a temperature above 0."""
    top = Top(row)
    if not math.isfinite(top.greatest):
        top = Top(readable(row))
        if top.greatest == -math.inf:
            return Candidates(np.zeros(1, dtype=np.int64), np.ones(1))
    if 0 < sampling.top_k < len(top.row):
        return _of_few(top.row, top.ranked(sampling.top_k), sampling)
    if sampling.typical_p < 1.0:
        typical = _typical_of_all(top, sampling.typical_p)
        return _of_few(top.row, typical, replace(sampling, typical_p=1.0))
    n = HEAD
    if excludes(sampling):
        # All that XTC may leave out is among so many.
        n = max(n, int(min(1 / max(sampling.xtc_threshold, 1e-9), len(top.row))) + 1)
    head = top.ranked(n)
    if len(head) < n or len(head) == len(top.row):
        return _of_few(top.row, head, sampling)
    return _of_all(top, head, sampling)


def _of_few(row: Row, ids: Ids, sampling: Sampling) -> Candidates:
    """What the filters leave of `ids`, which are ranked."""
    values = row[ids].astype(np.float64)
    weights = np.exp(values - values[0])
    if sampling.typical_p < 1.0:
        mean = float((weights * values).sum() / weights.sum())
        kept = _typical(values, weights, mean, sampling.typical_p * float(weights.sum()))
        ids = ids[kept]
        values = values[kept]
        weights = weights[kept]
    n = _cut(weights, float(weights.sum()), sampling)
    n_excluded = _excluded(weights[:n], float(weights[:n].sum()), sampling)
    return _tempered(ids[:n], values[:n] - values[n_excluded], n_excluded, sampling)


def _of_all(top: Top, head: Ids, sampling: Sampling) -> Candidates:
    """What the filters leave of a row of which `head` are the greatest, ranked."""
    row = top.row
    base = base_of(top.greatest)
    weights = None
    total = 0.0
    values = row[head].astype(np.float64)
    head_weights = np.exp(values - base)
    if sampling.top_p < 1.0 or excludes(sampling):
        weights = weigh(row, base, 1.0, buffer("weights", len(row)))
        total = float(block_sums(weights).sum())
    n = _cut(head_weights, total, sampling)
    if n < len(head):
        n_excluded = _excluded(head_weights[:n], float(head_weights[:n].sum()), sampling)
        return _tempered(head[:n], values[:n] - values[n_excluded], n_excluded, sampling)
    mask = _passing_mask(top, weights, total, sampling)
    if weights is not None and excludes(sampling):
        total = total if mask is None else float(np.dot(weights, mask))
    n_excluded = _excluded(head_weights, total, sampling)
    if weights is None or sampling.temperature != 1.0:
        if sampling.temperature != 1.0:
            base = float(values[n_excluded])
        weights = weigh(row, base, sampling.temperature, buffer("weights", len(row)))
    if mask is not None:
        weights *= mask
    weights[head] = 0.0
    return _tempered(head, values - base, n_excluded, sampling, weights)


def _cut(weights: Values, total: float, sampling: Sampling) -> int:
    """How many of the ranked `weights` top_p and min_p leave, at least one; all or more where they
    may end behind them."""
    n = len(weights)
    if sampling.top_p < 1.0:
        n = int(np.searchsorted(np.cumsum(weights), sampling.top_p * total)) + 1
    if sampling.min_p > 0.0:
        n = min(n, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    return max(1, n)


def _passing_mask(top: Top, weights: Row | None, total: float, sampling: Sampling) -> Row | None:
    """1 for each token of the row that top_p and min_p leave, else 0; None where both leave all."""
    row = top.row
    mask = None
    if weights is not None and sampling.top_p < 1.0:
        mask = fewest(row, weights, sampling.top_p * total)
    if sampling.min_p > 0.0:
        passes = row >= np.float32(top.greatest + math.log(sampling.min_p))
        if mask is not None:
            return np.multiply(mask, passes, out=mask)
        mask = buffer("mask", len(row))
        np.copyto(mask, passes)
    return mask


def _typical(values: Values, weights: Values, mean: float, goal: float) -> Ids:
    """Which of the ranked `values` are the nearest to the `mean` logit that weigh `goal` together:
    locally typical sampling (arXiv 2202.00666), since a token's surprise less the entropy is how
    far its logit is below the mean one."""
    order = np.argsort(np.abs(values - mean), kind="stable")
    return np.sort(order[: int(np.searchsorted(np.cumsum(weights[order]), goal)) + 1])


def _typical_of_all(top: Top, share: float) -> Ids:
    """The same of a whole row, that weigh `share` of it: looked for among ever more of the
    greatest, until all that are left are further from the mean."""
    row = top.row
    base = base_of(top.greatest)
    weights = weigh(row, base, 1.0, buffer("weights", len(row)))
    total = float(block_sums(weights).sum())
    # what is forbidden weighs nothing, but nothing times infinity is no number
    far = np.subtract(row, np.float32(base), out=buffer("far", len(row)))
    np.maximum(far, np.float32(-1e3), out=far)
    mean = base + float(np.dot(weights, far)) / total
    for n in (HEAD, 16 * HEAD, len(row)):
        head = top.ranked(n)
        values = row[head].astype(np.float64)
        kept = _typical(values, np.exp(values - base), mean, share * total)
        furthest = float(np.abs(values[kept] - mean).max())
        if len(kept) < len(head) < len(row) and furthest < mean - values[-1]:
            break
    return head[kept]


def excludes(sampling: Sampling) -> bool:
    """Does XTC leave anything out?"""
    return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5


def _excluded(weights: Values, total: float, sampling: Sampling) -> int:
    """How many of the ranked `weights` XTC may leave out: all of at least xtc_threshold of the
    `total` but the least of them."""
    if not excludes(sampling):
        return 0
    return max(0, int(np.count_nonzero(weights >= sampling.xtc_threshold * total)) - 1)


def _tempered(
    ids: Ids, values: Values, n_excluded: int, sampling: Sampling, rest: Row | None = None
) -> Candidates:
    """`ids`, which have these logits less a base, with their weights at the temperature; `rest` is
    relative to the same base.

    XTC ("exclude top choices") leaves the first `n_excluded` out with xtc_probability. Whether it
    does is not drawn here: this is the mixture of both cases, which one draw then follows exactly,
    and which a drafted token can be verified against like any other distribution.
    """
    far = values / sampling.temperature
    weights = np.exp(far[n_excluded:])
    if n_excluded:
        chance = min(1.0, sampling.xtc_probability)
        left = float(weights.sum()) + (float(block_sums(rest).sum()) if rest is not None else 0.0)
        log_all = float(np.logaddexp.reduce(np.append(far[:n_excluded], math.log(left))))
        share_of_one = (1.0 - chance) * math.exp(-log_all) + chance / left
        excluded = (1.0 - chance) * np.exp(far[:n_excluded] - log_all) / share_of_one
        weights = np.concatenate([excluded, weights])
    return Candidates(ids, weights, rest)
