"""The filters of a whole row in double precision, where a good part of the vocabulary may be drawn.

Bounds (row_bounds.py) settle most rows. What is left here takes a pass in double precision, or sorting the logits, but neither
puts all tokens in order nor makes a distribution of them.
"""

from __future__ import annotations

import math

import numpy as np

from localllm.engine.messages import Sampling
from localllm.engine.sampling.logits import Ids, Logits
from localllm.engine.sampling.ranking import HEAD, Row, by_rank
from localllm.engine.sampling.top_choices import NOTHING, Excluded, goal_of, left_out_by
from localllm.engine.sampling.weighed import DOUBLE, FEW, Values, Weighed, passing, weigh
from localllm.engine.sampling.weights import BLOCK

# Rows shorter than this are soon sampled by the definition.
_LONG = 8192


def pick_exactly(logits: Logits, temperature: float, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The token that `uniform` draws from the softmax of the whole row, the best `HEAD` of them first, by rank, and behind them
    the others by their ids. None where rounding decides, or the definition is as quick."""
    weighed = weigh(logits, temperature)
    left_out = 0
    if excluded.chance:
        found = left_out_by(logits, weighed, excluded) if weighed is not None else None
        if found is None:
            return None
        left_out = found
    best = logits.best()
    if len(logits) < _LONG or not math.isfinite(best):
        return None
    if not _more_than(4 * HEAD, logits):
        return None  # all are in order, and soon put so
    head = logits.top(HEAD)
    token = None
    if weighed is not None and (sums := _single_sums(weighed)) is not None:
        behind = _Behind(logits, head, weighed.weights.offset, temperature, sums)
        token = behind.at(uniform, weighed.total, weighed.error, left_out, excluded)
    if token is None:
        sums = _exact_sums(logits.whole(), best, temperature)
        token = _Behind(logits, head, best, temperature, sums).at(
            uniform, float(sums.sum()), DOUBLE, left_out, excluded
        )
    return token


def _more_than(n: int, logits: Logits) -> bool:
    """Are more than `n` tokens not forbidden?"""
    if logits.peaks.n_above(-math.inf) - len(logits.changed) > n:
        return True
    return int(np.count_nonzero(logits.whole() > -np.inf)) > n


class _Behind:
    """A whole row's tokens, `head` first, with the sums of the weights e^((logit - offset) / temperature) of its blocks."""

    def __init__(self, logits: Logits, head: Ids, offset: float, temperature: float, sums: Values) -> None:
        self._logits, self._head, self._offset, self._temperature = logits, head, offset, temperature
        weights = self._weights(head)
        self._reached = np.cumsum(weights)
        rest = sums.copy()
        np.subtract.at(rest, head // BLOCK, weights)
        self._behind = np.cumsum(rest) + self._reached[-1]

    def _weights(self, ids: Ids) -> Values:
        return np.exp((self._logits.at(ids).astype(np.float64) - self._offset) / self._temperature)

    def at(self, uniform: float, total: float, error: float, left_out: int, excluded: Excluded) -> int | None:
        """The token at `uniform`, where the sums and their `total` are known but for this part of it; None where that decides."""
        reached = self._reached
        gone = float(reached[left_out - 1]) if left_out else 0.0
        goals = [goal_of(uniform, total * (1.0 + sign * error), gone, excluded) for sign in (-1.0, 1.0)]
        if goals[1] < reached[-1]:
            return _clearly(self._head, reached, goals, DOUBLE * total)
        behind = self._behind
        block = int(np.searchsorted(behind, goals[0], side="right"))
        ids = np.arange(block * BLOCK, min(len(self._logits), (block + 1) * BLOCK))
        ids = ids[~np.isin(ids, self._head)]
        if not len(ids):
            return None
        before = float(behind[block - 1]) if block else float(reached[-1])
        return _clearly(ids, before + np.cumsum(self._weights(ids)), goals, error * total, before)


def _clearly(ids: Ids, reached: Values, goals: list[float], error: float, before: float = -math.inf) -> int | None:
    """The one of `ids` in which the goal lies, which is somewhere between `goals`; None where an `error` of the sums decides."""
    low, high = goals[0] - error, goals[1] + error
    at = int(np.searchsorted(reached, low, side="right"))
    apart = before < low and at < len(ids) and high < reached[at]
    return int(ids[at]) if apart else None


def _single_sums(weighed: Weighed) -> Values | None:
    """The sums of the blocks as the changes leave them; None where too many changed."""
    logits, sums = weighed.logits, weighed.weights.sums.astype(np.float64)
    if logits.changes:
        before, after = logits.both()
        if len(before) > FEW:
            return None
        np.add.at(sums, logits.changed // BLOCK, weighed.exact(after) - weighed.exact(before))
    return sums


def _exact_sums(row: Row, best: float, temperature: float) -> Values:
    """Sums of the weights e^((logit - best) / temperature) of blocks, in double precision."""
    sums = np.zeros(-(-len(row) // BLOCK))
    piece_tokens = 128 * BLOCK
    scratch, ones = np.empty(piece_tokens), np.ones(BLOCK)
    for first in range(0, len(row), piece_tokens):
        piece = scratch[: len(row) - first]
        np.copyto(piece, row[first : first + piece_tokens])
        piece -= best
        if temperature != 1.0:
            piece /= temperature
        np.exp(piece, piece)
        whole, at = len(piece) // BLOCK, first // BLOCK
        sums[at : at + whole] = piece[: whole * BLOCK].reshape(whole, BLOCK) @ ones
        if whole * BLOCK < len(piece):
            sums[at + whole] = piece[whole * BLOCK :].sum()
    return sums


def cut_sorted(logits: Logits, sampling: Sampling) -> Ids | None:
    """`cut` where a good part of the vocabulary may be left: the logits are put in order, and of the tokens only those that
    stay."""
    row = logits.whole()
    best = float(row.max())
    if len(row) < _LONG or not math.isfinite(best):
        return None
    values = np.sort(row)[::-1]
    weights = np.exp(values.astype(np.float64) - best)
    keep = len(weights)
    if sampling.top_p < 1.0:
        reached = np.cumsum(weights)
        goal = sampling.top_p * reached[-1]
        keep = int(np.searchsorted(reached, goal)) + 1
        if keep > len(weights) or float(np.abs(reached[max(0, keep - 2) : keep + 1] - goal).min()) <= DOUBLE * goal:
            return None
    if sampling.min_p > 0.0:
        left = passing(weights, sampling.min_p)
        if left is None:
            return None
        keep = min(keep, left)
    return by_rank(row, np.flatnonzero(row >= values[keep - 1]))[:keep]
