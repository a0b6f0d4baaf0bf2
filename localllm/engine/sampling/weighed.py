"""What the tokens of a row weigh that a request changed: what is known of the total, and the tokens near the best, one by one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localllm.engine.sampling.logits import Ids, Logits
from localllm.engine.sampling.ranking import Row
from localllm.engine.sampling.weights import BLOCK, Weights

# Tokens of at least this share of all are looked at one by one, or, where that is not enough, of this share.
SHARES = (2.0**-12, 2.0**-17)
# With more blocks of them than this the definition is as quick.
_MOST_BLOCKS = 512
# How far a sum in double precision may be off, as a part of it.
DOUBLE = 1e-11
# So many changed logits are weighed in double precision.
FEW = 512
_WITHIN = np.arange(BLOCK, dtype=np.int64)

Values = NDArray[np.float64]


class Weighed:
    """The weights of logits at a temperature: those of the row in blocks, and the `total` of what the changes leave of
    them, which is known but for `error`, a part of it."""

    def __init__(self, logits: Logits, weights: Weights) -> None:
        self.logits, self.weights = logits, weights
        self.total, off = weights.total, weights.total * weights.error
        if logits.changes:
            before, after = logits.both()
            if len(before) > FEW:
                before, after = self._single(before), self._single(after)
                off += float(before.sum(dtype=np.float64) + after.sum(dtype=np.float64)) * weights.error
                self.total += float(after.sum(dtype=np.float64) - before.sum(dtype=np.float64))
            else:
                self.total += float((self.exact(after) - self.exact(before)).sum())
        self.error = off / self.total + DOUBLE if self.total > 0 else math.inf

    def near(self, share: float) -> tuple[Ids, Row] | None:
        """The tokens of at least about that share of the total and their logits, best first; None if they are many."""
        w, least = self.weights, self.total * share
        bound = np.float32(least * (1.0 - 1e-3))
        blocks = np.flatnonzero(w.sums >= bound)
        if len(blocks) > _MOST_BLOCKS:
            return None
        ids = (blocks[:, None] * BLOCK + _WITHIN).ravel()
        if len(blocks) and blocks[-1] == len(w.sums) - 1:
            ids = ids[: np.searchsorted(ids, len(self.logits))]
        raised = self.logits.raised
        if len(raised):
            ids = np.concatenate([ids, raised[w.sums[raised // BLOCK] < bound]])
        values = self.logits.at(ids) if self.logits.changes else self.logits.row[ids]
        keep = np.flatnonzero(values >= np.float32(math.log(least) * w.temperature + w.offset))
        ids, values = ids[keep], values[keep]
        order = np.lexsort((ids, -values))
        return ids[order], values[order]

    def _single(self, values: Row) -> Row:
        w = self.weights
        values = values - np.float32(w.offset) if w.offset else values
        found: Row = np.exp(values / np.float32(w.temperature) if w.temperature != 1.0 else values)
        return found

    def exact(self, values: Row) -> Values:
        """The weights of logits in double precision."""
        return np.exp((values.astype(np.float64) - self.weights.offset) / self.weights.temperature)

    def settled(self, answer: Callable[[float], int]) -> int | None:
        """`answer`, a monotone function of the total; None where that is not known well enough."""
        found = answer(self.total * (1.0 - self.error))
        return found if found == answer(self.total * (1.0 + self.error)) else None


def weigh(logits: Logits, temperature: float, *, moments: bool = False) -> Weighed | None:
    weights = logits.facts.weights(temperature, moments=moments)
    found = Weighed(logits, weights) if weights.usable else None
    return found if found is not None and found.error < 1e-3 else None


def passing(weights: Values, min_p: float) -> int | None:
    """How many of `weights` (the best is 1) pass min_p, at least one; None where rounding decides."""
    left = int(np.count_nonzero(weights >= min_p * (1.0 + DOUBLE)))
    return max(1, left) if left == int(np.count_nonzero(weights >= min_p * (1.0 - DOUBLE))) else None
