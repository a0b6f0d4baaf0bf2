"""Passes over a row of logits (float32 [n_vocab]): its greatest ones, what its tokens weigh, and
where a running sum ends.

A row of 262,144 logits is a megabyte, and each pass over it costs tens of microseconds: so the
passes are few, and write into buffers that are kept (a fresh megabyte costs as much as a pass).
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Values = NDArray[np.float64]

# Weights are summed up by blocks of so many tokens.
BLOCK = 64
# The greatest logits are looked for in about so many groups of tokens that stand as far apart:
# numpy takes the greatest of whole columns twelve times as quickly as that of pieces of a row.
_GROUPS = 4096
# So many tokens of a row are put in order to guess where a running sum ends. The band that holds
# the end is cut into so many bins; tokens further than this (in nats) below its greatest weigh
# nothing.
_SAMPLE = 1024
_BINS = 256
_FAR = 100.0
# A greatest logit nearer to 0 than this leaves e^logit room enough in single precision.
_ROOM = 60.0
_ONES = np.ones(BLOCK, dtype=np.float32)
_kept = threading.local()


def buffer(name: str, n: int) -> Row:
    """This thread's buffer of that name, of `n` numbers; what it holds is lost with the next
    call."""
    buffers: dict[str, Row] | None = getattr(_kept, "buffers", None)
    if buffers is None:
        buffers = _kept.buffers = {}
    if len(buffers.get(name, ())) < n:
        buffers[name] = np.empty(n, dtype=np.float32)
    return buffers[name][:n]


class Top:
    """The greatest logits of a `row`, found by the peaks of groups. `greatest` is NaN where the row
    holds one."""

    def __init__(self, row: Row) -> None:
        self.row = row
        size = max(1, len(row) // _GROUPS)
        self._width = len(row) // size
        self._columns = row[: size * self._width].reshape(size, self._width)
        self._peaks = np.concatenate([self._columns.max(axis=0), row[size * self._width :]])
        self.greatest = float(self._peaks.max())

    def at_least(self, least: float) -> Ids:
        """The tokens of at least `least` (above -inf), ascending."""
        groups = np.flatnonzero(self._peaks >= np.float32(least))
        inner = groups[: np.searchsorted(groups, self._width)]
        if least == -math.inf or 4 * len(inner) > self._width:
            return np.flatnonzero(
                self.row >= np.float32(least) if least > -math.inf else self.row > -np.inf
            )
        found = np.flatnonzero(self._columns.take(inner, axis=1) >= np.float32(least))
        member, group = np.divmod(found, max(1, len(inner)))
        behind = groups[len(inner) :] + (self._columns.size - self._width)
        return np.concatenate([member * self._width + inner[group], behind])

    def ranked(self, k: int) -> Ids:
        """The `k` (> 0) greatest above -inf, greatest first and the lower id first among equals."""
        least = -math.inf
        if 4 * k <= len(self._peaks):
            least = float(np.partition(self._peaks, -k)[-k])
        ids = self.at_least(least)
        if len(ids) > 2 * k + 1024:
            values = self.row[ids]
            ids = ids[values >= np.partition(values, -k)[-k]]
        return ids[np.argsort(-self.row[ids], kind="stable")][:k]


def base_of(best: float) -> float:
    """What a row's weights are relative to: where single precision has room for e^logit, nothing
    need be subtracted."""
    return 0.0 if abs(best) < _ROOM else best


def weigh(row: Row, base: float, temperature: float, out: Row) -> Row:
    """What each token weighs, e^((logit - base) / temperature), into `out`."""
    with np.errstate(over="ignore", invalid="ignore"):
        if base:
            row = np.subtract(row, np.float32(base), out=out)
        if temperature != 1.0:
            row = np.multiply(row, np.float32(min(1.0 / temperature, 1e30)), out=out)
        return np.exp(row, out=out)


def block_sums(weights: Row) -> Values:
    """The sums of blocks of `BLOCK` tokens."""
    whole = len(weights) // BLOCK
    sums = weights[: whole * BLOCK].reshape(whole, BLOCK) @ _ONES
    return np.append(sums, weights[whole * BLOCK :].sum()).astype(np.float64)


def token_at(weights: Row, sums: Values, goal: float) -> int:
    """The token in which the running sum of `weights` passes `goal`; never one that weighs
    nothing."""
    reached = np.cumsum(sums)
    block = min(int(np.searchsorted(reached, goal, side="right")), int(np.flatnonzero(sums)[-1]))
    goal -= float(reached[block] - sums[block])
    piece = weights[block * BLOCK : (block + 1) * BLOCK]
    within = np.cumsum(piece, dtype=np.float64)
    return block * BLOCK + min(
        int(np.searchsorted(within, goal, side="right")), int(np.flatnonzero(piece)[-1])
    )


def fewest(keys: Row, weights: Row, goal: float, total: float, head: Ids) -> Row:
    """1 for each of the fewest tokens of the greatest `keys` (equals by id) that weigh `goal` of
    the `total` together, else 0.

    Where that ends is guessed by the `head`, which are the heaviest tokens, and a sample of the
    others. The weights above the guess are summed up, and once more above a better guess; from
    there on go bands of tokens, until one holds the end.
    """
    points, below = _outline(keys, weights, total, head)
    last, mask = len(points) - 1, buffer("mask", len(keys))
    wanted = total - goal
    for _ in range(2):
        at = min(int(np.searchsorted(below, wanted)), last)
        above = keys > points[at]
        np.copyto(mask, above)
        mass = float(np.dot(weights, mask))
        wanted = float(below[at]) + mass - goal
    upwards, margin = mass >= goal, 2
    while True:
        # Further than the outline says, and again as far where that was not enough.
        end = int(np.searchsorted(below, below[at] + 1.4 * (mass - goal)))
        end = min(max(end, at) + margin, last) if upwards else max(min(end, at) - margin, 0)
        further = keys > points[end]
        ids = np.flatnonzero(above ^ further)
        band = float(weights[ids].sum(dtype=np.float64))
        if end in (0, last) or (mass - band < goal if upwards else mass + band >= goal):
            mask[ids] = _fewest_of_few(
                keys[ids], weights[ids], goal - (mass - band if upwards else mass)
            )
            return mask
        mask[ids] = 0.0 if upwards else 1.0
        mass += -band if upwards else band
        above, at, margin = further, end, 2 * margin


def _outline(keys: Row, weights: Row, total: float, head: Ids) -> tuple[Row, Values]:
    """Some of the keys, ascending, between two that no key is beyond; and about what all tokens up
    to each weigh."""
    step = max(1, len(keys) // _SAMPLE)
    known, some = weights[head], weights[::step].astype(np.float64)
    some[some > known.min()] = 0.0
    some *= (total - float(known.sum(dtype=np.float64))) / max(float(some.sum()), 1e-30)
    points = np.concatenate([keys[::step], keys[head]])
    order = np.argsort(points)
    below = np.cumsum(np.concatenate([some, known])[order])
    return np.concatenate([[-np.inf], points[order], [np.inf]], dtype=np.float32), np.concatenate(
        [[0.0], below, [total]]
    )


def _fewest_of_few(keys: Row, weights: Row, goal: float) -> Row:
    """The same among a few tokens: their weights are summed up by bins, and one bin is put in
    order."""
    if not len(keys):
        return weights
    far = np.minimum(keys.max() - keys, np.float32(_FAR))
    bins = (far * np.float32((_BINS - 1) / max(float(far.max()), 1e-30))).astype(np.int64)
    reached = np.cumsum(np.bincount(bins, weights, _BINS))
    at = min(int(np.searchsorted(reached, goal)), int(bins.max()))
    mask: Row = (bins < at).astype(np.float32)
    ids = np.flatnonzero(bins == at)
    order = ids[np.argsort(-keys[ids], kind="stable")]
    behind = (float(reached[at - 1]) if at else 0.0) + np.cumsum(weights[order], dtype=np.float64)
    mask[order[: int(np.searchsorted(behind, goal)) + 1]] = 1.0
    return mask
