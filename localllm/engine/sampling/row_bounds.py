"""The filters of a whole row without a double-precision softmax of the whole row, or putting all of it in order.

top_p, typical_p and a draw ask where a running sum of the best tokens' weights reaches a part of all weights' sum. That
sum is taken in single precision, where its error has a bound; only tokens near the best are looked at one by one. Every answer
given here is that of the plain definition in double precision: where the bound, or the tokens looked at, leave it open, there is
none (None), and the definition itself is computed. min_p needs no sum at all: it is a bound on the logit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from localllm.engine.messages import Sampling
from localllm.engine.sampling.logits import Ids, Logits
from localllm.engine.sampling.ranking import HEAD, Row, by_rank
from localllm.engine.sampling.top_choices import NOTHING, Excluded, goal_of, left_out_by
from localllm.engine.sampling.weighed import SHARES, Values, Weighed, passing, weigh


def cut(given: Row | Logits, sampling: Sampling) -> Ids | None:
    """The tokens that top_p and min_p leave of a row, best first."""
    logits = given if isinstance(given, Logits) else Logits(given)
    if sampling.top_p >= 1.0:
        return _above(logits, sampling.min_p)
    weighed = weigh(logits, 1.0)
    if weighed is None:
        return None
    found = _running(weighed, lambda reached, total: int(np.searchsorted(reached, sampling.top_p * total)) + 1)
    if found is None:
        # Where min_p leaves less, nobody need know where top_p would cut.
        ids = _above(logits, sampling.min_p) if sampling.min_p > 0.0 else None
        return ids if ids is not None and _within(weighed, ids, sampling.top_p) else None
    ids, weights, keep = found
    if sampling.min_p <= 0.0:
        return ids[:keep]
    left = passing(weights[:keep] / weights[0], sampling.min_p)
    return None if left is None else ids[:left]


def pick(given: Row | Logits, temperature: float, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The token that `uniform` in [0, 1) draws from the softmax of the whole row, best first; None where it is none of the
    best `HEAD`, behind which no order is kept."""
    logits = given if isinstance(given, Logits) else Logits(given)
    weighed = weigh(logits, temperature)
    if weighed is None:
        return None
    left_out = left_out_by(logits, weighed, excluded) if excluded.chance else 0
    if left_out is None:
        return None

    def reaching(reached: Values, total: float) -> int:
        if len(reached) <= left_out:
            return len(reached) + 1
        goal = goal_of(uniform, total, float(reached[left_out - 1]) if left_out else 0.0, excluded)
        return int(np.searchsorted(reached, goal, side="right")) + 1

    found = _running(weighed, reaching)
    return int(found[0][found[2] - 1]) if found is not None and found[2] <= HEAD else None


def _running(weighed: Weighed, reaching: Callable[[Values, float], int]) -> tuple[Ids, Values, int] | None:
    """The best tokens, ranked, their weights, and how many of them it takes for their running sum to be `reaching` what is
    wanted of the total."""
    for share in SHARES:
        near = weighed.near(share)
        if near is None:
            return None
        ids, weights = near[0], weighed.exact(near[1])
        reached = np.cumsum(weights)
        keep = weighed.settled(lambda total, reached=reached: reaching(reached, total))  # type: ignore[misc]
        if keep is None or keep <= len(ids):
            return None if keep is None else (ids, weights, keep)
    return None


def _above(logits: Logits, min_p: float) -> Ids | None:
    best = logits.best()
    if not math.isfinite(best):
        return None
    least = best + math.log(min_p) - 1e-3
    found = logits.above(least)
    if found is None:
        row = logits.whole()
        ids = by_rank(row, np.flatnonzero(row >= np.float32(least)))
        left = passing(np.exp(row[ids].astype(np.float64) - best), min_p)
        return None if left is None else ids[:left]
    ids, values = found
    order = np.lexsort((ids, -values))
    left = passing(np.exp(values[order].astype(np.float64) - best), min_p)
    return None if left is None else ids[order[:left]]


def _within(weighed: Weighed, ids: Ids, top_p: float) -> bool:
    """Would top_p leave all of `ids`, the best?"""
    held = float(weighed.exact(weighed.logits.at(ids[:-1])).sum())
    return held < top_p * weighed.total * (1.0 - weighed.error)


def typical(given: Row | Logits, mass: float) -> Ids | None:
    """The tokens of a row that typical_p leaves, best first."""
    logits = given if isinstance(given, Logits) else Logits(given)
    weighed = weigh(logits, 1.0, moments=True)
    if weighed is None:
        return None
    # Surprise less entropy is how far a logit is below the mean one.
    mean, error = _mean(weighed)
    if not math.isfinite(mean):
        return None
    for share in SHARES:
        near = weighed.near(share)
        if near is None:
            return None
        ids, values = near[0], near[1].astype(np.float64)
        far = np.abs(values - mean)
        order = np.argsort(far, kind="stable")
        reached = np.cumsum(weighed.exact(near[1][order]))
        keep = weighed.settled(lambda total, reached=reached: int(np.searchsorted(reached, mass * total)) + 1)  # type: ignore[misc]
        if keep is None:
            return None
        # What was not looked at must be further from the mean than all that is left.
        least = math.log(weighed.total * share) + weighed.weights.offset
        if keep < len(ids) and mean - far[order[keep - 1]] > least + 0.01:
            if not _apart(values[order], far[order], keep, error):
                return None
            return ids[np.sort(order[:keep])]
    return None


def _mean(weighed: Weighed) -> tuple[float, float]:
    """The mean logit, by weight, and how far off it may be."""
    logits, weights = weighed.logits, weighed.weights
    moment, off = weights.moment, weights.moment_error
    if logits.changes:
        for values, sign in zip(logits.both(), (-1.0, 1.0), strict=True):
            some = values[values > weights.offset - 80.0]
            moment += sign * float((weighed.exact(some) * (some.astype(np.float64) - weights.offset)).sum())
    mean = moment / weighed.total
    return mean + weights.offset, off / weighed.total + 2.0 * weighed.error * abs(mean)


def _apart(values: Values, far: Values, keep: int, error: float) -> bool:
    """Are the first `keep`, in this order by distance from the mean, and the last of them, the same wherever within the error
    that mean is? Equals keep their order."""
    last = keep - 1
    close = np.flatnonzero(np.abs(far - far[last]) <= 2.0 * error)
    return bool((values[close] == values[last]).all())
