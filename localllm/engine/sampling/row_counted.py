"""A draw from a filtered row of which a good part may be drawn: tokens in bins by their logits, of which one is put in order.

Bounds (row_bounds.py) settle rows with words that stand out. Where a filter leaves a hundred thousand tokens, the definition
puts all of them in order, which takes tens of milliseconds. But the order is asked for in two places only: where the filter
cuts, and where the draw lies. So the weights are summed by bin, in double precision, and the bin of such a place is sorted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm.engine.messages import Sampling
from localllm.engine.sampling.logits import NO_IDS, Ids, Logits
from localllm.engine.sampling.ranking import Row, by_rank
from localllm.engine.sampling.top_choices import NOTHING, Excluded
from localllm.engine.sampling.weighed import DOUBLE, Values

# Rows shorter than this are soon sampled by the definition.
_LONG = 8192
# A bin of a flat row of 262,144 tokens holds some hundreds: as soon sorted as the bins are summed.
_BINS = 4096
# What lies further than this below the best has no weight that double precision would show.
_DEEPEST = 60.0
# Rows are read in pieces that stay in a processor's own cache.
_PIECE = 16_384
# How near two distances from the mean logit may be before rounding decides.
_APART = 1e-9
_UP = np.float32(np.inf)


@dataclass(frozen=True, slots=True)
class _Place:
    """In an order of tokens: in this bin, which has `ids` in order, behind the first `n` of them."""

    bin: int
    ids: Ids
    n: int


class _Binned:
    """The tokens of a row, the greatest of which is finite, in bins by how far a logit is from `origin` (the greatest, or one
    in their midst); what those weigh, by `weights`; their running sums `reached`, and the `total` of all."""

    def __init__(self, row: Row, weights: Values, origin: float) -> None:
        self.row, self.origin, best, least = row, origin, float(row.max()), float(row.min())
        lowest = best - _DEEPEST
        deep, least = least < lowest, max(least, lowest)
        self._least = np.float32(least)
        single = np.float32(origin)
        furthest = float(max(abs(single - self._least), abs(np.float32(best) - single)))
        self.scale = (_BINS - 1) / (furthest * (1 + 1e-5) + 1e-30)
        # Behind so much from its edges a bin is sure to hold what belongs there: three roundings in single precision.
        self.edge = abs(origin - float(single)) + 2.5e-7 * furthest
        self.bins: NDArray[np.uint16] = np.empty(len(row), dtype=np.uint16)
        for first in range(0, len(row), _PIECE):
            piece = row[first : first + _PIECE]
            self.bins[first : first + _PIECE] = self._bins_of(np.maximum(piece, self._least) if deep else piece)
        self.weigh(weights)

    def _bins_of(self, logits: Row) -> NDArray[np.int32]:
        far = np.abs(logits - np.float32(self.origin))
        far *= np.float32(self.scale)
        bins: NDArray[np.int32] = far.astype(np.int32)
        return bins

    def weigh(self, weights: Values) -> None:
        """Let the tokens have these weights."""
        self.weights, masses = weights, np.zeros(_BINS)
        for first in range(0, len(self.row), _PIECE):
            piece = slice(first, first + _PIECE)
            masses += np.bincount(self.bins[piece], weights[piece], _BINS)
        self.reached = np.cumsum(masses)
        self.total = float(self.reached[-1])

    def _before(self, at: int) -> float:
        return float(self.reached[at - 1]) if at else 0.0

    def _in_order(self, at: int) -> Ids:
        """The tokens of a bin: by rank, or by how far they are from an origin in their midst, and then by rank."""
        ids = by_rank(self.row, np.flatnonzero(self.bins == np.uint16(at)))
        far = np.abs(self.row[ids].astype(np.float64) - self.origin)
        return ids[np.argsort(far, kind="stable")]

    def passing(self, goal: float) -> _Place | None:
        """Where the running sum passes `goal`; None where rounding decides."""
        at = int(np.searchsorted(self.reached, goal))
        if at == _BINS:
            return None
        ids = self._in_order(at)
        reached = np.cumsum(np.concatenate([[self._before(at)], self.weights[ids]]))
        n = max(1, int(np.searchsorted(reached, goal)))
        # Nothing is before the first of all.
        near = float(np.abs(reached[0 if at else 1 :] - goal).min(initial=math.inf))
        return None if near <= DOUBLE * self.total or n > len(ids) else _Place(at, ids, n)

    def down_to(self, least: np.float32) -> _Place:
        """Behind all tokens of at least `least`, where the origin is the greatest logit."""
        if least > self.origin:
            return _Place(0, NO_IDS, 0)
        at = int(self._bins_of(np.maximum([least], self._least))[0])
        ids = self._in_order(at)
        return _Place(at, ids, int(np.count_nonzero(self.row[ids] >= least)))

    def following(self, place: _Place) -> int | None:
        """The token that stands behind that place, if any does."""
        ids, n = place.ids, place.n
        if n == len(ids):
            # The bin of a place at the very beginning was not looked into.
            at = place.bin + (1 if n else 0)
            at = int(np.min(self.bins, where=self.bins >= np.uint16(at), initial=_BINS - 1))
            ids, n = self._in_order(at), 0
        return int(ids[n]) if len(ids) else None

    def sum_to(self, place: _Place) -> float:
        """The weights of all tokens up to there."""
        return self._before(place.bin) + float(self.weights[place.ids[: place.n]].sum())


def draw(logits: Logits, sampling: Sampling, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The token at `uniform` in [0, 1) of what typical_p, top_p and min_p leave of a row; None where rounding decides, or the
    definition is as quick."""
    row = logits.whole()
    best = float(row.max())
    if len(row) < _LONG or not math.isfinite(best):
        return None
    weights = _weights(row, best, 1.0)
    binned = _Binned(row, weights, best)
    # What is left lies between these two.
    start, end = _Place(0, NO_IDS, 0), _Place(_BINS, NO_IDS, 0)
    if sampling.typical_p < 1.0:
        between = _typical(binned, sampling.typical_p)
        if between is None:
            return None
        start, end = between
    gone, total = binned.sum_to(start), binned.sum_to(end)
    if sampling.top_p < 1.0:
        cut = binned.passing(gone + sampling.top_p * (total - gone))
        if cut is None:
            return None
        end, total = cut, binned.sum_to(cut)
    if sampling.min_p > 0.0:
        greatest = binned.following(start)
        least = _least(float(row[greatest]), sampling.min_p) if greatest is not None else None
        if least is None:
            return None
        cut = binned.down_to(least)
        if (cut.bin, cut.n) < (end.bin, end.n):
            end, total = cut, binned.sum_to(cut)
    if excluded.chance and excluded.threshold * (total - gone) * (1.0 - DOUBLE) <= 1.0:
        return None  # some token may be excluded: the best weighs 1
    if sampling.temperature != 1.0:
        binned.weigh(_weights(row, best, sampling.temperature))
        gone, total = binned.sum_to(start), binned.sum_to(end)
    found = binned.passing(gone + uniform * (total - gone))
    return int(found.ids[found.n - 1]) if found is not None else None


def _weights(row: Row, best: float, temperature: float) -> Values:
    """What every token weighs; the best weighs 1."""
    weights = np.empty(len(row))
    for first in range(0, len(row), _PIECE):
        piece = weights[first : first + _PIECE]
        np.subtract(row[first : first + _PIECE], best, out=piece, dtype=np.float64)
        if temperature != 1.0:
            piece /= temperature
        np.exp(piece, piece)
    return weights


def _typical(ranked: _Binned, mass: float) -> tuple[_Place, _Place] | None:
    """Behind what and up to what stands what typical_p leaves of tokens by rank; None where rounding decides."""
    row, best = ranked.row, ranked.origin
    # Surprise less entropy is how far a logit is below the mean one.
    mean = best + _moment(row, ranked.weights, best) / ranked.total
    binned = _Binned(row, ranked.weights, mean)
    found = binned.passing(mass * binned.total)
    if found is None:
        return None
    values = row[found.ids].astype(np.float64)
    far = np.abs(values - mean)
    last, value = float(far[found.n - 1]), row[found.ids[found.n - 1]]
    # Equals keep their order. What is as far on the other side, or may be in the next bin, is told by rounding.
    equal = far - last <= _APART
    equal &= last - far <= _APART
    low, high = (last - binned.edge) * binned.scale, (last + binned.edge) * binned.scale
    if last <= _APART or not (values[equal] == value).all() or low <= found.bin > 0 or high >= found.bin + 1:
        return None
    left_out = int(np.count_nonzero(equal[found.n :]))
    if value <= mean:
        end = ranked.down_to(value)
        return ranked.down_to(_at_least(mean + last)), _Place(end.bin, end.ids, end.n - left_out)
    if left_out:
        return None  # not the last of what is left by rank
    return ranked.down_to(np.nextafter(value, _UP)), ranked.down_to(_at_least(mean - last))


def _at_least(value: float) -> np.float32:
    """The least single that is not below `value`."""
    found = np.float32(value)
    return found if float(found) >= value else np.nextafter(found, _UP)


def _moment(row: Row, weights: Values, best: float) -> float:
    """The sum of (logit - best) by weight."""
    moment, deep = 0.0, float(row.min()) < best - 700.0
    for first in range(0, len(row), _PIECE):
        piece = row[first : first + _PIECE] - np.float64(best)
        if deep:  # nothing times infinity is no number
            np.maximum(piece, -1e3, out=piece)
        piece *= weights[first : first + _PIECE]
        moment += float(piece.sum())  # np.dot of so many doubles wakes threads, and those take milliseconds
    return moment


def _least(best: float, min_p: float) -> np.float32 | None:
    """The least logit that passes min_p; None where rounding decides."""
    least = np.float32(best + math.log(min_p))
    weight = math.exp(float(least) - best)
    if abs(float(np.spacing(least))) < _APART or abs(weight - min_p) <= DOUBLE * min_p:
        return None
    return least if weight > min_p else np.nextafter(least, _UP)
