"""XTC ("exclude top choices") in a draw from a whole row: how many tokens are left out, and where among the rest a draw lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from localllm.engine.sampling.logits import Ids, Logits
from localllm.engine.sampling.weighed import SHARES, Weighed, weigh
from localllm.engine.sampling.weights import BLOCK


@dataclass(frozen=True, slots=True)
class Excluded:
    """XTC: with this `chance` tokens of at least `threshold` (their probability at temperature 1), but the least of them, are
    left out."""

    chance: float = 0.0
    threshold: float = 1.0


NOTHING = Excluded()


def goal_of(uniform: float, total: float, gone: float, excluded: Excluded) -> float:
    """Where among the running sums of all weights `uniform` lies. With a chance the first of them, `gone`, are left out: what
    it draws is a mixture of both cases."""
    if not gone:
        return uniform * total
    both, rest = 1.0 - excluded.chance, max(total - gone, 1e-300)
    if uniform * total < both * gone:
        return uniform * total / both
    return (uniform + excluded.chance * gone / rest) / (both / total + excluded.chance / rest)


def left_out_by(logits: Logits, weighed: Weighed, excluded: Excluded) -> int | None:
    """How many of the best tokens XTC leaves out; None where rounding decides. `weighed` at any temperature."""
    heat = weighed.weights.temperature
    near = weighed.near(SHARES[0]) if heat != 1.0 else None
    if near is not None and len(near[0]):
        hot = weighed.exact(near[1]) ** heat
        low = float(hot.sum())
        found = [int(np.count_nonzero(hot >= excluded.threshold * t)) for t in (low, low + _rest(weighed, near[0]))]
        if found[0] == found[1] and hot[-1] < excluded.threshold * low:
            return max(0, found[0] - 1)
    if heat != 1.0:
        plain = weigh(logits, 1.0)
        return None if plain is None else left_out_by(logits, plain, excluded)
    near = weighed.near(min(0.5, 0.9 * excluded.threshold)) if excluded.threshold > 0.0 else None
    if near is None:
        return None
    weights = weighed.exact(near[1])
    count = weighed.settled(lambda total: int(np.count_nonzero(weights >= excluded.threshold * total)))
    return None if count is None else max(0, count - 1)


def _rest(weighed: Weighed, near: Ids) -> float:
    """At most what all but `near` weigh at temperature 1. Of 64 numbers of a given sum, the sum of their powers is greatest
    where they are equal (exponents below 1) or all but one are nothing (above)."""
    w = weighed.weights
    sums = w.sums.astype(np.float64) * (1.0 + 1e-4)
    np.subtract.at(sums, near // BLOCK, weighed.exact(weighed.logits.row[near]))
    np.maximum(sums, w.sums * 1e-4, out=sums)
    most = float((sums**w.temperature).sum()) * float(BLOCK ** max(0.0, 1.0 - w.temperature))
    raised = weighed.logits.raised
    return most + float((weighed.exact(weighed.logits.at(raised)) ** w.temperature).sum())
