"""A draw from a filtered row of which a good part may be drawn: tokens in bins by their logits, of which one is put in order.

Bounds (row_bounds.py) settle rows with words that stand out. Where a filter leaves a hundred thousand tokens, the definition
puts all of them in order, which takes tens of milliseconds. But the order is asked for in two places only: where the filter
cuts, and where the draw lies. So the weights are summed by bin, in double precision, and the bin of such a place is sorted.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from localllm.engine.logits import Ids, Logits
from localllm.engine.messages import Sampling
from localllm.engine.ranking import Row, by_rank
from localllm.engine.top_choices import NOTHING, Excluded
from localllm.engine.weighed import DOUBLE, Values

# Rows shorter than this are soon sampled by the definition.
_LONG = 8192
# A bin of a flat row of 262,144 tokens holds some hundreds: as soon sorted as the bins are summed.
_BINS = 4096
# What lies further than this below the best has no weight that double precision would show.
_DEEPEST = 60.0
_PIECE = 16_384
# How near two distances from the mean logit may be before rounding decides which is greater.
_APART = 1e-9


class _Binned:
    """The tokens of a row, which has finite logits, in bins by how far a logit is from `origin` (its greatest, or one in its
    midst); `masses` are the bins' weights at a temperature, of which the best token's is 1, and `total` all of them."""

    def __init__(self, row: Row, temperature: float = 1.0, origin: float | None = None) -> None:
        self.row, self._temperature = row, temperature
        self._best, least = float(row.max()), float(row.min())
        lowest = self._best - _DEEPEST * max(1.0, temperature)
        if least < lowest:
            least = lowest
            row = np.maximum(row, np.float32(lowest))
        self._origin = self._best if origin is None else origin
        furthest = max(abs(self._origin - least), abs(self._best - self._origin))
        self.scale = (_BINS - 1) / (furthest * (1 + 1e-6)) if furthest > 0 else 0.0
        self.masses = np.zeros(_BINS)
        self.bins: NDArray[np.uint16] = np.empty(len(row), dtype=np.uint16)
        for first in range(0, len(row), _PIECE):
            piece = row[first : first + _PIECE].astype(np.float64)
            bins = (np.abs(piece - self._origin) * self.scale).astype(np.intp)
            self.bins[first : first + _PIECE] = bins
            self.masses += np.bincount(bins, self._weigh(piece), _BINS)
        self.reached = np.cumsum(self.masses)
        self.total = float(self.reached[-1])

    def _weigh(self, values: Values) -> Values:
        values = values - self._best
        if self._temperature != 1.0:
            values /= self._temperature
        return np.exp(values, values)

    def place(self, goal: float) -> tuple[int, Ids, int, float] | None:
        """Where the running sum passes `goal`: the bin, its tokens in order, how many of those it takes, and the sum with them.
        None where rounding decides."""
        at = int(np.searchsorted(self.reached, goal))
        if at == _BINS:
            return None
        ids = self._in_order(np.flatnonzero(self.bins == at))
        before = float(self.reached[at - 1]) if at else 0.0
        reached = before + np.cumsum(self._weigh(self.row[ids].astype(np.float64)))
        near = float(np.abs(reached - goal).min()) if len(ids) else 0.0
        n = int(np.searchsorted(reached, goal)) + 1
        if min(near, abs(before - goal) if at else near) <= DOUBLE * self.total or n > len(ids):
            return None
        return at, ids, n, float(reached[n - 1])

    def _in_order(self, ids: Ids) -> Ids:
        ids = by_rank(self.row, ids)
        if self._origin == self._best:
            return ids
        far = np.abs(self.row[ids].astype(np.float64) - self._origin)
        return ids[np.argsort(far, kind="stable")]

    def up_to(self, at: int, ids: Ids, n: int) -> Row:
        """The row with nothing behind that place."""
        left = np.where(self.bins <= np.uint16(at), self.row, np.float32(-np.inf))
        left[ids[n:]] = -np.inf
        return left


def draw(logits: Logits, sampling: Sampling, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The token at `uniform` in [0, 1) of what typical_p, top_p and min_p leave of a row; None where rounding decides, or the
    definition is as quick."""
    row: Row | None = logits.whole()
    if row is None or len(row) < _LONG or not math.isfinite(float(row.max())):
        return None
    if sampling.typical_p < 1.0:
        row = _typical(row, sampling.typical_p)
        if row is None:
            return None
    binned = _Binned(row)
    end = binned.total
    if sampling.top_p < 1.0:
        found = binned.place(sampling.top_p * end)
        if found is None:
            return None
        row, end = binned.up_to(*found[:3]), found[3]
    if sampling.min_p > 0.0:
        least = _least(row, sampling.min_p)
        if least is None:
            return None
        if np.count_nonzero(row >= least) < np.count_nonzero(row > -np.inf):
            row = np.where(row >= least, row, np.float32(-np.inf))
            binned = _Binned(row)
            end = binned.total
    if excluded.chance and 1.0 >= excluded.threshold * end * (1.0 - DOUBLE):
        return None  # some token may be excluded: the best weighs 1
    if sampling.temperature != 1.0:
        binned = _Binned(row, sampling.temperature)
        end = binned.total
    found = binned.place(uniform * end)
    return int(found[1][found[2] - 1]) if found is not None else None


def _typical(row: Row, mass: float) -> Row | None:
    """The row with nothing but what typical_p leaves; None where rounding decides."""
    # Surprise less entropy is how far a logit is below the mean one.
    mean = _mean(row)
    binned = _Binned(row, origin=mean)
    found = binned.place(mass * binned.total)
    if found is None:
        return None
    at, ids, n, _ = found
    far = np.abs(row[ids].astype(np.float64) - mean)
    last = float(far[n - 1])
    # Equals keep their order. What is as far on the other side, or may be in the next bin, is told by rounding.
    equal = (row[ids[np.abs(far - last) <= _APART]] == row[ids[n - 1]]).all()
    inside = (not at or (last - _APART) * binned.scale > at) and (last + _APART) * binned.scale < at + 1
    return binned.up_to(at, ids, n) if equal and inside else None


def _mean(row: Row) -> float:
    """The mean logit, by weight."""
    best = float(row.max())
    total = moment = 0.0
    for first in range(0, len(row), _PIECE):
        piece = row[first : first + _PIECE].astype(np.float64) - best
        weights = np.exp(piece)
        total += float(weights.sum())
        moment += float(np.dot(weights, piece if piece.min() >= -_DEEPEST else np.maximum(piece, -_DEEPEST)))
    return best + moment / total


def _least(row: Row, min_p: float) -> np.float32 | None:
    """The least logit that passes min_p; None where rounding decides."""
    best = float(row.max())
    least = best + math.log(min_p)
    nearest = np.float32(least)
    weight = math.exp(float(nearest) - best)
    if abs(float(np.spacing(nearest))) < _APART or abs(weight - min_p) <= DOUBLE * min_p:
        return None
    return nearest if weight > min_p else np.nextafter(nearest, np.float32(np.inf))
