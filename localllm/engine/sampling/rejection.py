"""A distribution over tokens, and exact acceptance of drafted tokens by maximal coupling.

A token x drafted from q is accepted with probability min(1, p(x)/q(x)). Otherwise a token is drawn
from the normalised (p − q)+. The emitted token follows p exactly, and no rule accepts more often:
the acceptance probability is 1 − TV(p, q).

Source: Leviathan et al., arXiv 2211.17192, theorem 3.5 and appendix A.1; Chen et al., arXiv
2302.01318.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sparse distribution: `ids` with `probs` (float64, summing to 1).

    The most probable token comes first, and equal ones are ordered by id. If no token was filtered
    out, only the head is in this order, and the long rest is ordered by id.
    """

    ids: NDArray[np.int64]
    probs: NDArray[np.float64]

    def prob(self, token: int) -> float:
        """Probability of `token` (0.0 if it was filtered out)."""
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
    """Verify a drafted `token`: return (token to emit, whether it is the drafted one).

    The token was drawn from `q` and is verified against `p`. Both uniforms are in [0, 1),
    independent of each other and of the draw of `token`.
    """
    if accept_uniform * q.prob(token) < p.prob(token):
        return token, True
    return residual(p, q).draw(draw_uniform), False


def residual(p: Distribution, q: Distribution) -> Distribution:
    """The normalised (p − q)+; `p` itself if the difference is zero (p and q are equal up to
    rounding).
    """
    left = np.maximum(p.probs - _probs_of(q, p.ids), 0.0)
    mass = float(left.sum())
    if mass <= 1e-12:
        return p
    return Distribution(p.ids, left / mass)


def _probs_of(dist: Distribution, ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """The probabilities of `ids` in `dist`, 0 for missing ones (float64, the shape of `ids`)."""
    order = np.argsort(dist.ids)
    known = dist.ids[order]
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    result: NDArray[np.float64] = np.where(known[at] == ids, dist.probs[order][at], 0.0)
    return result
