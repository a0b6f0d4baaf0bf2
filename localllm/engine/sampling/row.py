"""Passes over a row of logits (float32 [n_vocab]): its greatest ones, what its tokens weigh, and where a running sum ends.

A row of 262,144 logits is a megabyte, and each pass over it costs tens of microseconds: so the passes are few, and write into
buffers that are kept (a fresh megabyte costs as much as a pass).
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
# The greatest logits are looked for in about so many groups of tokens that stand as far apart: numpy takes the greatest
# of whole columns twelve times as quickly as that of pieces of a row.
_GROUPS = 4096
# So many tokens of a row are put in order to guess where a running sum ends, and the tokens so many of them around the guess.
_SAMPLE = 2048
_MARGIN = 5
_ONES = np.ones(BLOCK, dtype=np.float32)
_kept = threading.local()


def buffer(name: str, n: int) -> Row:
    """This thread's buffer of that name, of `n` numbers; what it holds is lost with the next call."""
    buffers: dict[str, Row] | None = getattr(_kept, "buffers", None)
    if buffers is None:
        buffers = _kept.buffers = {}
    if len(buffers.get(name, ())) < n:
        buffers[name] = np.empty(n, dtype=np.float32)
    return buffers[name][:n]


class Top:
    """The greatest logits of a `row`, found by the peaks of groups. `greatest` is NaN where the row holds one."""

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
            return np.flatnonzero(self.row >= np.float32(least) if least > -math.inf else self.row > -np.inf)
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


def narrowed(row: Row, mask: Row) -> Row:
    """`row` with all tokens forbidden whose `mask` is 0, in a buffer; the mask is lost."""
    mask -= np.float32(0.5)
    mask *= np.float32(np.inf)
    return np.minimum(row, mask, out=buffer("narrowed", len(row)))


def weigh(row: Row, best: float, temperature: float, out: Row) -> Row:
    """What each token weighs, e^((logit - best) / temperature), into `out`."""
    with np.errstate(over="ignore", invalid="ignore"):
        np.subtract(row, np.float32(best), out=out)
        if temperature != 1.0:
            np.multiply(out, np.float32(min(1.0 / temperature, 1e30)), out=out)
        return np.exp(out, out=out)


def block_sums(weights: Row) -> Values:
    """The sums of blocks of `BLOCK` tokens."""
    whole = len(weights) // BLOCK
    sums = weights[: whole * BLOCK].reshape(whole, BLOCK) @ _ONES
    return np.append(sums, weights[whole * BLOCK :].sum()).astype(np.float64)


def token_at(weights: Row, sums: Values, goal: float) -> int:
    """The token in which the running sum of `weights` passes `goal`; never one that weighs nothing."""
    reached = np.cumsum(sums)
    block = min(int(np.searchsorted(reached, goal, side="right")), int(np.flatnonzero(sums)[-1]))
    goal -= float(reached[block] - sums[block])
    piece = weights[block * BLOCK : (block + 1) * BLOCK]
    within = np.cumsum(piece, dtype=np.float64)
    return block * BLOCK + min(int(np.searchsorted(within, goal, side="right")), int(np.flatnonzero(piece)[-1]))


def reaching(keys: Row, weights: Row, goal: float, total: float, head: Ids) -> Row:
    """1 for each of the fewest tokens of the greatest `keys` (equals by id) that weigh `goal` of the `total` together, else 0.

    Where that ends is guessed by the `head`, which are the heaviest tokens, and a sample of the others; then the weights above the
    guess are summed up, and the tokens around it put in order. A guess that was wrong is moved by what was missing.
    """
    points, below = _outline(keys, weights, total, head)
    mask = buffer("mask", len(keys))
    at, margin = int(np.searchsorted(below, total - goal)), 0
    while True:
        first, last = at - margin, at + margin
        above = keys > (points[last] if last < len(points) else np.float32(np.inf))
        np.copyto(mask, above)
        mass = float(np.dot(weights, mask))
        if mass < goal and margin:
            around = np.logical_xor(keys >= (points[first] if first >= 0 else np.float32(-np.inf)), above, out=above)
            ids = np.flatnonzero(around)
            values = keys[ids]
            order = np.argsort(values)[::-1]
            reached = mass + np.cumsum(weights[ids[order]], dtype=np.float64)
            if first < 0 or reached[-1] >= goal:
                n = min(int(np.searchsorted(reached, goal)), len(ids) - 1) + 1
                least = values[order[n - 1]]
                sure = ids[values > least]
                mask[sure] = 1.0
                mask[ids[values == least][: n - len(sure)]] = 1.0
                return mask
            at, last, mass = first, first, float(reached[-1])
        # As many points further as weigh what was too much, or too little.
        at = int(np.searchsorted(below, below[min(last, len(below) - 1)] + mass - goal))
        margin = max(_MARGIN, 2 * margin)


def _outline(keys: Row, weights: Row, total: float, head: Ids) -> tuple[Row, Values]:
    """Some of the keys, ascending, and about what all tokens up to each weigh."""
    sample = np.arange(0, len(keys), max(1, len(keys) // _SAMPLE))
    some = weights[sample].astype(np.float64)
    known = weights[head].astype(np.float64)
    some[some > known.min()] = 0.0
    some *= (total - float(known.sum())) / max(float(some.sum()), 1e-30)
    ids = np.concatenate([sample, head])
    points = keys[ids]
    order = np.argsort(points)
    return points[order], np.cumsum(np.concatenate([some, known])[order])
