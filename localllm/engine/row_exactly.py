"""The filters of a whole row in double precision, where a good part of the vocabulary may be drawn.

Bounds (row_bounds.py) settle most rows. What is left here takes a pass in double precision, or sorting the logits, but neither
puts all tokens in order nor makes a distribution of them.
"""

from __future__ import annotations

import math

import numpy as np

from localllm.engine.logits import Ids, Logits
from localllm.engine.messages import Sampling
from localllm.engine.ranking import HEAD, Row, best_ids, by_rank
from localllm.engine.top_choices import NOTHING, Excluded, goal_of, left_out_by
from localllm.engine.weighed import DOUBLE, Values, passing, weigh
from localllm.engine.weights import BLOCK

# Rows shorter than this are soon sampled by the definition.
_LONG = 8192


def pick_exactly(logits: Logits, temperature: float, uniform: float, excluded: Excluded = NOTHING) -> int | None:
    """The same in double precision: behind the best `HEAD` the tokens stand by their ids. None where rounding decides, or the
    definition is as quick."""
    weighed = weigh(logits, temperature) if excluded.chance else None
    left_out = left_out_by(logits, weighed, excluded) if weighed is not None else None if excluded.chance else 0
    if left_out is None:
        return None
    row = logits.whole()
    best = float(row.max())
    if len(row) < _LONG or not math.isfinite(best) or np.count_nonzero(row > -np.inf) <= 4 * HEAD:
        return None  # the definition is as quick
    sums = _exact_sums(row, best, temperature)
    total = float(sums.sum())
    head = best_ids(row, HEAD)
    weights = np.exp((row[head].astype(np.float64) - best) / temperature)
    reached = np.cumsum(weights)
    goal = goal_of(uniform, total, float(reached[left_out - 1]) if left_out else 0.0, excluded)
    if goal < reached[-1]:
        return _clearly(head, reached, goal, total)
    np.subtract.at(sums, head // BLOCK, weights)
    behind = np.cumsum(sums) + reached[-1]
    block = int(np.searchsorted(behind, goal, side="right"))
    ids = np.setdiff1d(np.arange(block * BLOCK, min(len(row), (block + 1) * BLOCK)), head)
    if not len(ids):
        return None
    before = float(behind[block - 1]) if block else float(reached[-1])
    weights = np.exp((row[ids].astype(np.float64) - best) / temperature)
    return _clearly(ids, before + np.cumsum(weights), goal, total)


def _clearly(ids: Ids, reached: Values, goal: float, total: float) -> int | None:
    """The one of `ids` in which `goal` lies; None where rounding decides."""
    if float(np.abs(reached - goal).min()) <= DOUBLE * total:
        return None
    at = int(np.searchsorted(reached, goal, side="right"))
    return int(ids[at]) if at < len(ids) else None


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
