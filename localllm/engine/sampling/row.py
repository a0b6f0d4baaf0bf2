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
# Tokens further than this (in nats) below the greatest weigh nothing; halved so often, there is little
# between two logits.
_FAR = 100.0
_HALVINGS = 12
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
    if abs(best) < _ROOM:
        return 0.0
    return best


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


def fewest(row: Row, weights: Row, goal: float) -> Row:
    """1 for each of the fewest of the greatest tokens (equals by id) that weigh `goal` together,
    else 0. The logit at which that ends is closed in on by halves; the few between are ranked."""
    mask = buffer("mask", len(row))
    high = float(row.max())
    low = high - _FAR
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        np.greater(row, np.float32(middle), out=mask)
        if float(np.dot(weights, mask)) >= goal:
            low = middle
        else:
            high = middle
    np.greater(row, np.float32(high), out=mask)
    between = np.flatnonzero((row > np.float32(low)) & (row <= np.float32(high)))
    order = between[np.argsort(-row[between], kind="stable")]
    reached = float(np.dot(weights, mask)) + np.cumsum(weights[order], dtype=np.float64)
    mask[order[: int(np.searchsorted(reached, goal)) + 1]] = 1.0
    return mask
