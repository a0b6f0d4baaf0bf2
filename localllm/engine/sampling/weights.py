"""What the tokens of a row weigh, e^(logit / temperature), in single precision: sums by block, in one pass over the row.

Most of a token's sampling is this pass, so it is made of what numpy is quickest at here: the functions that will do are
timed once. The bound on the error is of the worst case, not of the usual one.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

BLOCK = 64
# Rows are read in pieces that stay in a processor's own cache.
_PIECE = 1024 * BLOCK
_EPS = 2.0**-24
_LOG2_E = 1.4426950408889634
# Beyond these a single-precision sum may have lost something at either end.
_LEAST, _MOST = 2.0**-60, 2.0**100
_mine = threading.local()
_ONES = np.ones(_PIECE, dtype=np.float32)

_Function = Callable[[Row, Row], object]


def _scratch() -> Row:
    found: Row | None = getattr(_mine, "scratch", None)
    if found is None:
        found = _mine.scratch = np.empty(_PIECE, dtype=np.float32)
    return found


@functools.cache
def _quicker(first: _Function, second: _Function) -> _Function:
    """The one of two numpy functions that takes less time on this machine."""
    row = np.linspace(-20.0, 10.0, 16_384, dtype=np.float32)
    out = np.empty_like(row)

    def seconds(function: _Function) -> float:
        spent = []
        for _ in range(5):
            started = time.perf_counter()
            function(row, out)
            spent.append(time.perf_counter() - started)
        return min(spent)

    return first if seconds(first) < seconds(second) else second


class Weights:
    """Of a `row` at a `temperature`: `sums` of blocks of 64 and their `total`, all of weights e^((logit - offset) / temperature),
    and the `error` of that total, at most this part of it. Not `usable` where the row holds no numbers. With `moments` (at
    temperature 1) also `moment`, the sum of all (logit - offset) · weight, and how far off that may be: `moment_error`."""

    def __init__(self, row: Row, temperature: float, *, moments: bool = False) -> None:
        self.row, self.temperature, self.moments = row, temperature, moments
        self.moment = self.moment_error = 0.0
        self.sums = np.zeros(-(-len(row) // BLOCK), dtype=np.float32)
        self.offset = 0.0
        self.error = math.inf
        # Logits are seldom large enough for anything to be lost; where they are, they are taken from the best.
        if not (temperature >= 0.25 and self._weigh(less_one=True)):
            self.offset = float(row.max())
            if math.isfinite(self.offset):
                self._weigh(less_one=False)

    @property
    def usable(self) -> bool:
        """Is the total known?"""
        return math.isfinite(self.error)

    def _weigh(self, *, less_one: bool) -> bool:
        plain = self.temperature == 1.0
        function: _Function = _quicker(np.expm1, np.exp) if plain and less_one else np.exp
        factor = 1.0 / self.temperature
        if not plain and (function := _quicker(np.exp2, np.exp)) is np.exp2:
            factor *= _LOG2_E
        one = np.float32(1.0 if plain else factor)
        self.moment = 0.0
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            self._fill(function, one)
        # What e^x - 1 loses of a small e^x, and of a block's sum.
        lost = 0.0
        if function is np.expm1:
            self.sums += np.float32(BLOCK)
            self.sums[-1] -= np.float32(len(self.sums) * BLOCK - len(self.row))
            lost = len(self.row) * (BLOCK + 2) * _EPS
        self.total = float(self.sums.sum(dtype=np.float64))
        if not _LEAST < self.total < _MOST:
            return False
        # A logit that is scaled or moved is rounded, by a part of it.
        moved = 0.0 if one == 1.0 and not self.offset else abs(math.log2(self.total)) + 64.0
        error = _EPS * (1.4 * moved + BLOCK + 10.0) + lost / self.total
        if error > 1e-4:
            return False
        if self.moments and not math.isfinite(self.moment):
            return False
        self.error = error
        # A negative logit's part is never more than 1/e, a positive one's at most the logarithm of the total times its weight.
        largest = self.total * abs(math.log(self.total)) + 0.4 * len(self.row)
        self.moment_error = error * largest + lost * 128.0
        return True

    def _fill(self, function: _Function, factor: np.float32) -> None:
        row, scratch = self.row, _scratch()
        ones = _ONES[:BLOCK]
        offset = np.float32(self.offset)
        for first in range(0, len(row), _PIECE):
            piece = row[first : first + _PIECE]
            out = scratch[: len(piece)]
            if self.offset:
                np.subtract(piece, offset, out)
                piece = out
            if factor != 1.0:
                np.multiply(piece, factor, out)
                piece = out
            values = piece
            if self.moments:
                if self.offset:  # what is forbidden has no part, but 0 times infinity is no number
                    values = piece = np.maximum(piece, np.float32(-80.0))
                if function is np.expm1:
                    self.moment += float(np.dot(values, _ONES[: len(values)]))
            function(piece, out)
            if self.moments:
                self.moment += float(np.dot(values, out))
            whole, at = len(out) // BLOCK, first // BLOCK
            np.dot(out[: whole * BLOCK].reshape(whole, BLOCK), ones, self.sums[at : at + whole])
            if whole * BLOCK < len(out):
                self.sums[at + whole] = out[whole * BLOCK :].sum()
