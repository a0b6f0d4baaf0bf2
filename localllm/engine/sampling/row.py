"""Operations on a row of logits (float32 [n_vocab]): greatest logits, weights and cumulative sums.

A row of 262,144 logits has a megabyte, and each pass over it costs tens of microseconds. So there
are few passes, and they write into reused buffers (allocating a megabyte costs as much as a pass).
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
Values = NDArray[np.float64]

# Weights are summed in blocks of this many tokens.
BLOCK = 64
# The greatest logits are searched for in about this many groups of tokens with a fixed stride.
# numpy computes maxima over columns twelve times as fast as over pieces of a row.
_GROUPS = 4096
# Tokens more than _NEGLIGIBLE_NATS (in nats) below the greatest have negligible weight. After this
# many halvings of the range few logits are left in it.
_NEGLIGIBLE_NATS = 100.0
_HALVINGS = 12
# If the greatest logit is closer to 0 than this, e^logit fits into single precision.
_MAX_EXPONENT = 60.0
_ONES = np.ones(BLOCK, dtype=np.float32)
_thread_buffers = threading.local()


def buffer(name: str, n: int) -> Row:
    """This thread's buffer called `name`, with `n` numbers. The next call may overwrite its
    contents.
    """
    buffers: dict[str, Row] | None = getattr(_thread_buffers, "buffers", None)
    if buffers is None:
        buffers = _thread_buffers.buffers = {}
    if len(buffers.get(name, ())) < n:
        buffers[name] = np.empty(n, dtype=np.float32)
    return buffers[name][:n]


class GreatestLogits:
    """The greatest logits of a `row`, found from the maxima of groups.

    `greatest` is NaN if the row contains NaN.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        size = max(1, len(row) // _GROUPS)
        self._width = len(row) // size
        self._columns = row[: size * self._width].reshape(size, self._width)
        self._peaks = np.concatenate([self._columns.max(axis=0), row[size * self._width :]])
        self.greatest = float(self._peaks.max())

    def at_least(self, threshold: float) -> Ids:
        """The tokens with logits of at least `threshold` (above -inf), ascending."""
        groups = np.flatnonzero(self._peaks >= np.float32(threshold))
        inner = groups[: np.searchsorted(groups, self._width)]
        if threshold == -math.inf or 4 * len(inner) > self._width:
            return np.flatnonzero(
                self.row >= np.float32(threshold) if threshold > -math.inf else self.row > -np.inf
            )
        flat = np.flatnonzero(self._columns.take(inner, axis=1) >= np.float32(threshold))
        member, group = np.divmod(flat, max(1, len(inner)))
        tail = groups[len(inner) :] + (self._columns.size - self._width)
        return np.concatenate([member * self._width + inner[group], tail])

    def ranked(self, k: int) -> Ids:
        """The `k` (> 0) greatest logits above -inf, greatest first; of equal ones the lower id
        first.
        """
        threshold = -math.inf
        if 4 * k <= len(self._peaks):
            threshold = float(np.partition(self._peaks, -k)[-k])
        ids = self.at_least(threshold)
        if len(ids) > 2 * k + 1024:
            values = self.row[ids]
            ids = ids[values >= np.partition(values, -k)[-k]]
        return ids[np.argsort(-self.row[ids], kind="stable")][:k]


def base_of(best: float) -> float:
    """The base to subtract from a row's logits; 0 if e^logit fits into single precision without
    it.
    """
    if abs(best) < _MAX_EXPONENT:
        return 0.0
    return best


def exp_weights(row: Row, base: float, temperature: float, out: Row) -> Row:
    """The weight of each token, e^((logit - base) / temperature), written to `out`."""
    with np.errstate(over="ignore", invalid="ignore"):
        if base:
            row = np.subtract(row, np.float32(base), out=out)
        if temperature != 1.0:
            row = np.multiply(row, np.float32(min(1.0 / temperature, 1e30)), out=out)
        return np.exp(row, out=out)


def block_sums(weights: Row) -> Values:
    """The sums of blocks of `BLOCK` tokens."""
    n_blocks = len(weights) // BLOCK
    sums = weights[: n_blocks * BLOCK].reshape(n_blocks, BLOCK) @ _ONES
    return np.append(sums, weights[n_blocks * BLOCK :].sum()).astype(np.float64)


def token_at(weights: Row, sums: Values, goal: float) -> int:
    """The token at which the cumulative sum of `weights` passes `goal`; never one with weight 0."""
    reached = np.cumsum(sums)
    block = min(int(np.searchsorted(reached, goal, side="right")), int(np.flatnonzero(sums)[-1]))
    goal -= float(reached[block] - sums[block])
    piece = weights[block * BLOCK : (block + 1) * BLOCK]
    within = np.cumsum(piece, dtype=np.float64)
    return block * BLOCK + min(
        int(np.searchsorted(within, goal, side="right")), int(np.flatnonzero(piece)[-1])
    )


def smallest_set_mask(row: Row, weights: Row, goal: float) -> Row:
    """1 for each of the greatest tokens that together reach the weight `goal`, else 0.

    It selects as few tokens as possible; of equal ones the lower id first. The logit of the last
    one is approached by bisection, and the few logits in the final range are ranked.
    """
    mask = buffer("mask", len(row))
    high = float(row.max())
    low = high - _NEGLIGIBLE_NATS
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
