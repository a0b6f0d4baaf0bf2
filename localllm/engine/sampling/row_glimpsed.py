"""A draw from a row with words that stand out, without the weights of the others: the peaks of groups bound those.

Summing what all tokens of a row weigh is most of a draw. Where few words stand out, what the others weigh in all is little,
and the peak of each group says at most how much. So the total lies between two numbers; most draws are the same for both.
Where a draw is not, or much may lie below, there is no answer (None), and the weights are summed.
"""

from __future__ import annotations

import math

import numpy as np

from localllm.engine.messages import Sampling
from localllm.engine.sampling.logits import Ids, Logits
from localllm.engine.sampling.ranking import HEAD
from localllm.engine.sampling.top_choices import NOTHING, Excluded, goal_of
from localllm.engine.sampling.weighed import DOUBLE, Values, passing

# Tokens within so many nats of the best are looked at one by one, unless they stand in more groups than this.
_NEAR = 9.0
_MOST_GROUPS = 256
# With more than this part of the weight below them few draws are told.
_MOST_BELOW = 0.1

# What was raised further above the row's best than this, at a temperature of 1, would be infinite.
_HIGHEST = 500.0


class _Near:
    """The best tokens of a row, ranked; what they weigh at a temperature, the row's greatest logit 1; and what all others
    weigh at most."""

    def __init__(self, logits: Logits, least: float, heats: set[float]) -> None:
        self._logits, self._least, self._heats = logits, least, heats
        self.below = {heat: logits.peaks.most_below(least, heat, len(logits.raised)) for heat in heats}

    def found(self) -> bool:
        """Find them; False where much may lie below."""
        peaks, least = self._logits.peaks, self._least
        if any(self.below[heat] > _MOST_BELOW * peaks.least_above(least, heat) for heat in self._heats):
            return False
        found = self._logits.above(least)
        if found is None or not len(found[0]):
            return False
        order = np.lexsort((found[0], -found[1]))
        self.ids = found[0][order]
        far = found[1][order].astype(np.float64) - peaks.greatest
        if far[0] > _HIGHEST * min(self._heats):
            return False
        self.weights = {heat: np.exp(far / heat) for heat in self._heats}
        self.reached = {heat: np.cumsum(weights) for heat, weights in self.weights.items()}
        return True

    def totals(self, heat: float) -> tuple[float, float]:
        """All tokens weigh something between these."""
        near = float(self.reached[heat][-1])
        return near * (1.0 - DOUBLE), (near + self.below[heat]) * (1.0 + DOUBLE)


def draw(logits: Logits, sampling: Sampling, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The token at `uniform` in [0, 1) of what top_p and min_p leave of a row, best first; None where the bounds leave that
    open, or it may stand behind the best `HEAD`."""
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0
    # min_p alone asks for no total, and where typical_p cuts depends on every weight.
    if sampling.typical_p < 1.0 or (filtered and (sampling.top_p >= 1.0 or excluded.chance)):
        return None
    heat, best = sampling.temperature, logits.peaks.greatest
    if not math.isfinite(best):
        return None
    least = best - _NEAR * max(1.0, heat)
    if logits.peaks.n_above(least) > _MOST_GROUPS:
        return None
    near = _Near(logits, least, {1.0, heat} if filtered or excluded.chance else {heat})
    if not near.found():
        return None
    return _filtered(near, sampling, uniform) if filtered else _unfiltered(near, heat, uniform, excluded)


def _unfiltered(near: _Near, heat: float, uniform: float, excluded: Excluded) -> int | None:
    left_out = 0
    if excluded.chance:
        weights, totals = near.weights[1.0], near.totals(1.0)
        counts = [int(np.count_nonzero(weights >= excluded.threshold * total)) for total in totals]
        if counts[0] != counts[1] or counts[0] == len(weights):
            return None
        left_out = max(0, counts[0] - 1)
    reached = near.reached[heat]
    gone = float(reached[left_out - 1]) if left_out else 0.0
    goals = [goal_of(uniform, total, gone, excluded) for total in near.totals(heat)]
    return _one(near.ids, reached, goals, min(len(reached), HEAD))


def _filtered(near: _Near, sampling: Sampling, uniform: float) -> int | None:
    weights, reached = near.weights[1.0], near.reached[1.0]
    passed = passing(weights / weights[0], sampling.min_p) if sampling.min_p > 0.0 else len(weights)
    if passed is None:
        return None
    cuts = [int(np.searchsorted(reached, sampling.top_p * total)) + 1 for total in near.totals(1.0)]
    if min(passed, cuts[1]) == len(weights):
        return None  # more may be left than was looked at
    keeps = [min(passed, cut) for cut in cuts]
    hot = near.reached[sampling.temperature]
    goals = [
        uniform * float(hot[keep - 1]) * part for keep, part in zip(keeps, (1.0 - DOUBLE, 1.0 + DOUBLE), strict=True)
    ]
    return _one(near.ids, hot, goals, keeps[0])


def _one(ids: Ids, reached: Values, goals: list[float], n: int) -> int | None:
    """The one of the first `n` of `ids` in which all of `goals` lie."""
    low, high = (int(np.searchsorted(reached, goal, side="right")) for goal in goals)
    return int(ids[low]) if low == high < n else None
