"""The filters: from a row of logits to the tokens that may be drawn, with their weights.

The order is llama.cpp's default: top_k, typical_p, top_p, min_p, XTC, temperature. Filters work on
probabilities before temperature, so a high temperature never admits tokens that the filters
removed. The filters mostly end within the greatest logits. These are ranked and processed in
double precision. If the filters reach further, the rest of the row is processed in single
precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from localllm.engine.messages import Sampling
from localllm.engine.sampling.rejection import Distribution
from localllm.engine.sampling.row import (
    GreatestLogits,
    Ids,
    Row,
    Values,
    base_of,
    block_sums,
    buffer,
    exp_weights,
    smallest_set_mask,
    token_at,
)
from localllm_backends.contract import MAX_SAMPLED_TOP_K

# The number of greatest logits to rank if top_k does not limit it. A backend draws among these.
HEAD = MAX_SAMPLED_TOP_K


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens that may be drawn: `ids`, greatest logit first, with their `weights`.

    `rest` has the weights of all other tokens (None: 0), in a buffer that is valid until the next
    row is filtered.
    """

    ids: Ids
    weights: Values
    rest: Row | None = None

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative weights: ranked tokens first, then by
        id.
        """
        reached = np.cumsum(self.weights)
        head_weight = float(reached[-1]) if len(reached) else 0.0
        if self.rest is not None:
            sums = block_sums(self.rest)
            rest_weight = float(sums.sum())
            goal = uniform * (head_weight + rest_weight)
            if goal >= head_weight and rest_weight > 0.0:
                return token_at(self.rest, sums, goal - head_weight)
        else:
            goal = uniform * head_weight
        return int(
            self.ids[min(int(np.searchsorted(reached, goal, side="right")), len(self.ids) - 1)]
        )

    def distribution(self) -> Distribution:
        """The same tokens with probabilities."""
        ids = self.ids
        weights = self.weights
        if self.rest is not None:
            others = np.flatnonzero(self.rest)
            ids = np.concatenate([ids, others])
            weights = np.concatenate([weights, self.rest[others].astype(np.float64)])
        return Distribution(ids, weights / weights.sum())


def distribution(row: Row, sampling: Sampling) -> Distribution:
    """The distribution a token is drawn from, after every filter and the temperature (> 0).

    row: float32 [n_vocab], with penalties and constraint applied; -inf is never drawn. Equal
    logits give an equal distribution in the same order, so a seed always draws the same token.
    """
    return candidates(row, sampling).distribution()


def without_nan(row: Row) -> Row:
    """`row` without NaN and +inf.

    NaN becomes -inf. If some logits are +inf, only those tokens stay allowed.
    """
    greatest = row.max()
    if math.isnan(greatest):
        row = np.where(np.isnan(row), np.float32(-np.inf), row)
        greatest = row.max()
    if greatest == np.inf:
        return np.where(row == np.inf, np.float32(0), np.float32(-np.inf))
    return row


def candidates(row: Row, sampling: Sampling) -> Candidates:
    """The tokens that pass the filters, at a temperature above 0."""
    top = GreatestLogits(row)
    if not math.isfinite(top.greatest):
        top = GreatestLogits(without_nan(row))
        if top.greatest == -math.inf:
            return Candidates(np.zeros(1, dtype=np.int64), np.ones(1))
    if 0 < sampling.top_k < len(top.row):
        return _from_ranked(top.row, top.ranked(sampling.top_k), sampling)
    if sampling.typical_p < 1.0:
        typical = _typical_of_all(top, sampling.typical_p)
        return _from_ranked(top.row, typical, replace(sampling, typical_p=1.0))
    n = HEAD
    if xtc_applies(sampling):
        # XTC can only exclude tokens among the first n.
        n = max(n, int(min(1 / max(sampling.xtc_threshold, 1e-9), len(top.row))) + 1)
    head = top.ranked(n)
    if len(head) < n or len(head) == len(top.row):
        return _from_ranked(top.row, head, sampling)
    return _from_full_row(top, head, sampling)


def _from_ranked(row: Row, ids: Ids, sampling: Sampling) -> Candidates:
    """Filter the ranked tokens `ids`."""
    values = row[ids].astype(np.float64)
    weights = np.exp(values - values[0])
    if sampling.typical_p < 1.0:
        mean = float((weights * values).sum() / weights.sum())
        typical = _typical(values, weights, mean, sampling.typical_p * float(weights.sum()))
        ids = ids[typical]
        values = values[typical]
        weights = weights[typical]
    n = _n_passing(weights, float(weights.sum()), sampling)
    n_excluded = _n_excluded(weights[:n], float(weights[:n].sum()), sampling)
    return _tempered(ids[:n], values[:n] - values[n_excluded], n_excluded, sampling)


def _from_full_row(top: GreatestLogits, head: Ids, sampling: Sampling) -> Candidates:
    """Filter an entire row. `head` has its greatest tokens, ranked."""
    row = top.row
    base = base_of(top.greatest)
    weights = None
    total = 0.0
    values = row[head].astype(np.float64)
    head_weights = np.exp(values - base)
    if sampling.top_p < 1.0 or xtc_applies(sampling):
        weights = exp_weights(row, base, 1.0, buffer("weights", len(row)))
        total = float(block_sums(weights).sum())
    n = _n_passing(head_weights, total, sampling)
    if n < len(head):
        n_excluded = _n_excluded(head_weights[:n], float(head_weights[:n].sum()), sampling)
        return _tempered(head[:n], values[:n] - values[n_excluded], n_excluded, sampling)
    mask = _passing_mask(top, weights, total, sampling)
    if weights is not None and xtc_applies(sampling):
        total = total if mask is None else float(np.dot(weights, mask))
    n_excluded = _n_excluded(head_weights, total, sampling)
    if weights is None or sampling.temperature != 1.0:
        if sampling.temperature != 1.0:
            base = float(values[n_excluded])
        weights = exp_weights(row, base, sampling.temperature, buffer("weights", len(row)))
    if mask is not None:
        weights *= mask
    weights[head] = 0.0
    return _tempered(head, values - base, n_excluded, sampling, weights)


def _n_passing(weights: Values, total: float, sampling: Sampling) -> int:
    """How many of the ranked `weights` pass top_p and min_p, at least one.

    If the result is len(weights) or more, further tokens may pass too.
    """
    n = len(weights)
    if sampling.top_p < 1.0:
        n = int(np.searchsorted(np.cumsum(weights), sampling.top_p * total)) + 1
    if sampling.min_p > 0.0:
        n = min(n, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    return max(1, n)


def _passing_mask(
    top: GreatestLogits, weights: Row | None, total: float, sampling: Sampling
) -> Row | None:
    """1 for each token of the row that passes top_p and min_p, else 0; None if all tokens pass."""
    row = top.row
    mask = None
    if weights is not None and sampling.top_p < 1.0:
        mask = smallest_set_mask(row, weights, sampling.top_p * total)
    if sampling.min_p > 0.0:
        passes = row >= np.float32(top.greatest + math.log(sampling.min_p))
        if mask is not None:
            return np.multiply(mask, passes, out=mask)
        mask = buffer("mask", len(row))
        np.copyto(mask, passes)
    return mask


def _typical(values: Values, weights: Values, mean: float, goal: float) -> Ids:
    """The ranked `values` nearest to the `mean` logit that have `goal` as their total weight.

    This is locally typical sampling (arXiv 2202.00666). A token's surprise minus the entropy
    equals the distance of its logit below the mean.
    """
    order = np.argsort(np.abs(values - mean), kind="stable")
    return np.sort(order[: int(np.searchsorted(np.cumsum(weights[order]), goal)) + 1])


def _typical_of_all(top: GreatestLogits, share: float) -> Ids:
    """The same for an entire row, with `share` of its total weight as the goal.

    It searches more and more of the greatest logits, until all others are further from the mean.
    """
    row = top.row
    base = base_of(top.greatest)
    weights = exp_weights(row, base, 1.0, buffer("weights", len(row)))
    total = float(block_sums(weights).sum())
    # Forbidden tokens have weight 0, but 0 times infinity is NaN.
    distances = np.subtract(row, np.float32(base), out=buffer("far", len(row)))
    np.maximum(distances, np.float32(-1e3), out=distances)
    mean = base + float(np.dot(weights, distances)) / total
    for n in (HEAD, 16 * HEAD, len(row)):
        head = top.ranked(n)
        values = row[head].astype(np.float64)
        typical = _typical(values, np.exp(values - base), mean, share * total)
        furthest = float(np.abs(values[typical] - mean).max())
        if len(typical) < len(head) < len(row) and furthest < mean - values[-1]:
            break
    return head[typical]


def xtc_applies(sampling: Sampling) -> bool:
    """Can XTC exclude any token with these settings?"""
    return sampling.xtc_probability > 0.0 and sampling.xtc_threshold <= 0.5


def _n_excluded(weights: Values, total: float, sampling: Sampling) -> int:
    """How many of the ranked `weights` XTC may exclude.

    XTC excludes all but the last of those with at least xtc_threshold of the `total`.
    """
    if not xtc_applies(sampling):
        return 0
    return max(0, int(np.count_nonzero(weights >= sampling.xtc_threshold * total)) - 1)


def _tempered(
    ids: Ids, values: Values, n_excluded: int, sampling: Sampling, rest: Row | None = None
) -> Candidates:
    """`ids` with their weights at the temperature.

    `values` are the logits minus a base, and `rest` is relative to the same base.

    XTC ("exclude top choices") excludes the first `n_excluded` with probability xtc_probability.
    This function does not draw whether it does. It returns the mixture of both cases, so one draw
    is exact. A drafted token can be verified against it like against any other distribution.
    """
    scaled = values / sampling.temperature
    weights = np.exp(scaled[n_excluded:])
    if n_excluded:
        probability = min(1.0, sampling.xtc_probability)
        kept_weight = float(weights.sum()) + (
            float(block_sums(rest).sum()) if rest is not None else 0.0
        )
        log_all = float(np.logaddexp.reduce(np.append(scaled[:n_excluded], math.log(kept_weight))))
        share_of_one = (1.0 - probability) * math.exp(-log_all) + probability / kept_weight
        excluded = (1.0 - probability) * np.exp(scaled[:n_excluded] - log_all) / share_of_one
        weights = np.concatenate([excluded, weights])
    return Candidates(ids, weights, rest)
