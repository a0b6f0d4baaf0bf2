"""A row of logits and what one request changes of it, looked at without copying it.

A row of 262,144 logits is a megabyte, and every pass over it costs tens of microseconds per token. So what a request
changes (penalties, biases) is kept beside the row; the greatest logits are found by the peaks of interleaved groups, which
is one pass; and whoever asks twice about one row (the draw, and its log-probabilities) shares those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localllm.engine.sampling.penalties import Tally, penalised
from localllm.engine.sampling.ranking import Row, best_ids
from localllm.engine.sampling.weights import Weights

Ids = NDArray[np.int64]
NO_IDS: Ids = np.empty(0, dtype=np.int64)

# How many logits share a peak. They stand n / 64 apart: numpy takes the greatest of whole columns twelve times as quickly
# as that of pieces of a row.
_SHARING = 64
# What all tokens may weigh is bounded by the peaks of so many, which are found on the way.
_FINE = 8
# So many more than wanted are looked at where something changed: the best may have been lowered.
_LOWERED = 8
# Rows shorter than this are looked at whole.
_SHORT = 8192
_LOG2_E = 1.4426950408889634
_ROWS = np.arange(_SHARING, dtype=np.int64)[:, None]


def ranked(ids: Ids, values: Row) -> Ids:
    """`ids`, in any order, by their logits, greatest first; among equals the lower id."""
    return ids[np.lexsort((ids, -values))]


def _kth(values: Row, k: int) -> float:
    """The `k`-th greatest of `values`."""
    part = values.copy()
    part.partition(len(part) - k)
    return float(part[len(part) - k])


@dataclass(frozen=True)
class Changes:
    """What a request changes of a row: the tokens of a `tally` are penalised, and `ids` (ascending) have `values`."""

    ids: Ids = field(default_factory=lambda: NO_IDS)
    values: Row = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    tally: Tally | None = None

    def __bool__(self) -> bool:
        return bool(len(self.ids)) or self.tally is not None


UNCHANGED = Changes()


class Logits:
    """`row` (float32 [n_vocab], never written to) as `changes` leave it."""

    def __init__(self, row: Row, changes: Changes = UNCHANGED, facts: Facts | None = None) -> None:
        self.row, self.changes = row, changes
        self.facts = facts if facts is not None else Facts(row)
        self.peaks = self.facts.peaks

    def __len__(self) -> int:
        return len(self.row)

    def at(self, ids: Ids) -> Row:
        """The logits of `ids`."""
        out = self.row.take(ids)
        tally, own = self.changes.tally, self.changes.ids
        if tally is not None:
            counts = tally.of.take(ids)
            came = counts.nonzero()[0]
            out[came] = penalised(out[came], counts[came], tally.sampling)
        if len(own):
            at = np.minimum(np.searchsorted(own, ids), len(own) - 1)
            here = np.flatnonzero(own[at] == ids)
            out[here] = self.changes.values[at[here]]
        return out

    @property
    def changed(self) -> Ids:
        """Every token whose logit may differ from the row's, each once."""
        own, tally = self.changes.ids, self.changes.tally
        if tally is None:
            return own
        return np.concatenate([tally.ids, own[tally.of[own] == 0]]) if len(own) else tally.ids

    @property
    def raised(self) -> Ids:
        """Tokens whose logit may be above the row's: not those that are forbidden."""
        own, tally = self.changes, self.changes.tally
        return self.changed if tally is not None and tally.raises else own.ids[own.values > -np.inf]

    def both(self) -> tuple[Row, Row]:
        """The logits of the changed, in the row and here."""
        ids, tally = self.changed, self.changes.tally
        before = self.row[ids]
        if tally is None:
            return before, self.changes.values
        after = before.copy()
        n = len(tally.ids)
        after[:n] = penalised(before[:n], tally.of[tally.ids], tally.sampling)
        own = self.changes.ids
        if len(own):
            again = tally.of[own] > 0
            after[n:] = self.changes.values[~again]
            if again.any():
                order = np.argsort(tally.ids)
                after[order[np.searchsorted(tally.ids, own[again], sorter=order)]] = self.changes.values[again]
        return before, after

    def whole(self) -> Row:
        """All of them: the row itself where nothing changes it. What is no number is never drawn."""
        out = self.row
        if self.changes:
            out = self.row.copy()
            out[self.changed] = self.both()[1]
        most = out.max()
        if math.isnan(most):
            return np.where(np.isnan(out), np.float32(-np.inf), out)
        return np.where(out == np.inf, np.float32(0), np.float32(-np.inf)) if most == np.inf else out

    def without(self, ids: Seq[int]) -> Logits:
        """The same with `ids` forbidden."""
        gone = np.array(sorted({t for t in ids if 0 <= t < len(self)}), dtype=np.int64)
        never, own = np.full(len(gone), -np.inf, dtype=np.float32), self.changes
        if not len(own.ids):
            return Logits(self.row, Changes(gone, never, own.tally), self.facts)
        kept = ~np.isin(own.ids, gone)
        ids_, values = np.concatenate([own.ids[kept], gone]), np.concatenate([own.values[kept], never])
        order = np.argsort(ids_)
        return Logits(self.row, Changes(ids_[order], values[order], own.tally), self.facts)

    def any_left(self) -> bool:
        """Is anything not forbidden?"""
        # More groups with something in them than tokens that changed: one is as the row has it.
        if self.peaks.n_above(-math.inf) > len(self.changed):
            return True
        return self.best() != -math.inf

    def greatest(self) -> int:
        """The greatest one's token, the lowest of equals; 0 where everything is forbidden."""
        if self.changes:
            found = self.top(1)
            return int(found[0]) if len(found) else 0
        token = int(self.row.argmax())
        return token if not math.isnan(self.row[token]) else int(self.whole().argmax())

    def above(self, least: float) -> tuple[Ids, Row] | None:
        """The tokens of at least `least`, and their logits, in any order; None if they may be a quarter of all."""
        found = self._among(least)
        if found is None:
            return None
        if not self.changes:
            return found
        keep = np.flatnonzero(found[1] >= np.float32(least))
        return found[0][keep], found[1][keep]

    def _among(self, least: float) -> tuple[Ids, Row] | None:
        """Tokens with their logits, each once, among them all of at least `least`; None as in `above`."""
        ids = self.peaks.ids_above(least)
        if ids is None:
            return None
        values = self.row.take(ids)
        keep = (values >= np.float32(least)).nonzero()[0]
        ids, values = ids[keep], values[keep]
        if not self.changes:
            return ids, values
        raised = self.raised
        if len(raised):
            ids = np.concatenate([ids, raised[~(self.row[raised] >= np.float32(least))]])
        return ids, self.at(ids)

    def best(self) -> float:
        """The greatest of them; NaN where the row holds one."""
        most = self.peaks.greatest
        if not self.changes or not math.isfinite(most):
            return most
        # The row's greatest may have been lowered: some more of its peaks are looked at, then all above what was found.
        looked = self.above(self.peaks.kth(min(32, len(self.peaks))))
        if looked is not None and len(looked[1]):
            found = float(looked[1].max())
            looked = self.above(found)
            if looked is not None:
                return float(looked[1].max())
        return float(self.whole().max())

    def top(self, k: int) -> Ids:
        """Ids of the `k` (> 0) greatest above -inf, greatest first and the lower id first among equals."""
        peaks, n_changed = self.peaks, min(len(self.changed), _LOWERED)
        if len(self) < _SHORT or 4 * (k + n_changed) > len(peaks) or not math.isfinite(peaks.greatest):
            return best_ids(self.whole(), k)
        least = peaks.kth(k + n_changed)
        found = self._among(least)
        if found is not None:
            worst = _kth(found[1], k)
            if worst < least:  # more was lowered than was looked at
                least, found = worst, self._among(worst)
        if found is None:
            return best_ids(self.whole(), k)
        keep = (found[1] >= np.float32(worst)).nonzero()[0]
        return ranked(found[0][keep], found[1][keep])[:k]


class Facts:
    """What was found out about a row as the model gave it."""

    def __init__(self, row: Row) -> None:
        self.row, self.peaks = row, Peaks(row)
        self._weights: dict[float, Weights] = {}

    def weights(self, temperature: float, *, moments: bool = False) -> Weights:
        """What its tokens weigh at `temperature`, with `moments` if those are wanted."""
        found = self._weights.get(temperature)
        if found is None or (moments and not found.moments):
            found = self._weights[temperature] = Weights(self.row, temperature, moments=moments)
        return found

    def log_total(self) -> float:
        """Natural logarithm of the sum of e^logit over the row."""
        weights = self.weights(1.0)
        if weights.usable:
            return math.log(weights.total) + weights.offset
        values = self.row.astype(np.float64)
        best = float(values.max())
        return best + math.log(float(np.exp(values - best).sum()))


class Peaks:
    """The greatest logit of every group of a row; computed when first asked for."""

    def __init__(self, row: Row) -> None:
        self._row = row
        self._width = len(row) // _SHARING
        self._peaks: Row | None = None
        self._fine: Row = np.empty(0, dtype=np.float32)
        self._greatest = math.nan

    def _found(self) -> Row:
        if self._peaks is None:
            rest = self._row[self._width * _SHARING :]
            columns = self._row[: self._width * _SHARING].reshape(_SHARING // _FINE, _FINE, self._width)
            fine = columns.max(axis=1)
            self._fine = fine.ravel()
            peaks = fine.max(axis=0) if self._width else self._fine
            self._peaks = np.concatenate([peaks, rest])
            self._greatest = float(self._peaks.max())
        return self._peaks

    def __len__(self) -> int:
        return self._width + len(self._row) - self._width * _SHARING

    @property
    def greatest(self) -> float:
        """The row's greatest logit; NaN where it holds one."""
        self._found()
        return self._greatest

    def kth(self, k: int) -> float:
        """The `k`-th (>= 1) greatest peak: at least `k` tokens of the row are as great."""
        return _kth(self._found(), k)

    def n_above(self, least: float) -> int:
        """How many groups hold something above `least`; 0 where one holds what is no number."""
        found = self._found()
        return 0 if math.isnan(self._greatest) else int(np.count_nonzero(found > np.float32(least)))

    def most_below(self, least: float, temperature: float, n_raised: int = 0) -> float:
        """At most so much do all tokens below `least` weigh, where the greatest logit weighs 1; `n_raised` of them may be above
        the row's."""
        coarse = self._found()
        total = 0.0
        for peaks, n in ((self._fine, _FINE), (coarse[self._width :], 1)):
            far = peaks - np.float32(self._greatest)
            far[peaks >= np.float32(least)] = least - self._greatest
            far *= np.float32(_LOG2_E / temperature)
            total += n * float(np.exp2(far, far).sum())
        return (total + n_raised * math.exp((least - self._greatest) / temperature)) * (1.0 + 1e-4)

    def least_above(self, least: float, temperature: float) -> float:
        """At least so much do all tokens of at least `least` weigh."""
        peaks = self._found()
        far = (peaks[peaks >= np.float32(least)] - self._greatest) / temperature
        return float(np.exp(far).sum())

    def ids_above(self, least: float) -> Ids | None:
        """Ids, each once, among them all of at least `least`; None where that is a quarter of the row or more, or nothing is
        known of -inf."""
        groups = (self._found() >= np.float32(least)).nonzero()[0]
        if 4 * len(groups) > len(self) or least == -math.inf:
            return None
        ids = (_ROWS * self._width + groups).ravel()
        if self._width * _SHARING == len(self._row):
            return ids
        inner = groups[: np.searchsorted(groups, self._width)]
        rest = groups[len(inner) :] + (_SHARING - 1) * self._width
        return np.concatenate([(_ROWS * self._width + inner).ravel(), rest])
