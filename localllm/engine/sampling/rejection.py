"""A distribution over tokens, and the exact acceptance of drafted ones: the maximal coupling of two
distributions.

Accept a token x drafted from q with probability min(1, p(x)/q(x)), else draw from the normalised (p
− q)+. What is emitted follows p exactly, and no rule accepts more often: the acceptance probability
is 1 − TV(p, q).
Source: Leviathan et al., arXiv 2211.17192, theorem 3.5 and appendix A.1; Chen et al., arXiv
2302.01318.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse distribution: `ids` with `probs` (float64, summing to 1), most probable first and
    equals by id. Where nothing was filtered out, only the head is in that order, and the long rest
    by id."""

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Probability of `token` (0.0 where filtered out)."""
        hit = np.flatnonzero(self.ids == token)
        if hit.size:
            return float(self.probs[hit[0]])
        return 0.0

    def draw(self, uniform: float) -> int:
        """The token at `uniform` in [0, 1) of the cumulative distribution."""
        index = int(np.searchsorted(np.cumsum(self.probs), uniform, side="right"))
        return int(self.ids[min(index, len(self.ids) - 1)])


def rejection_sample(
    p: Distribution, q: Distribution, token: int, accept_uniform: float, draw_uniform: float
) -> tuple[int, bool]:
    """(token to emit, whether it is the drafted one), for `token` drawn from `q` and verified
    against `p`.

    Both uniforms lie in [0, 1) and are independent of each other and of how `token` was drawn.
    """
    if accept_uniform * q.prob(token) < p.prob(token):
        return token, True
    return residual(p, q).draw(draw_uniform), False


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The normalised (p − q)+; `p` itself where nothing is left of it (p and q equal up to
    rounding)."""
    left = np.maximum(p.probs - _probs_of(q, p.ids), 0.0)
    mass = float(left.sum())
    if mass <= 1e-12:
        return p
    return Distribution(p.ids, left / mass)


def _probs_of(dist: Distribution, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Probabilities `dist` gives to `ids`, 0 where it holds none (float64, the shape of `ids`)."""
    order = np.argsort(dist.ids)
    known = dist.ids[order]
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    result: NDArray[np.float64] = np.where(known[at] == ids, dist.probs[order][at], 0.0)
    return result
