"""Exact count of KV cells under sharing: which tokens of which sequences stand in the same cell.

llama.cpp does not say how many cells are free. This mirrors what it does (seq_cp shares, seq_rm releases a cell when
its last sequence lets go), so that admission can be exact instead of hopeful.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import NoCellsError


class CellLedger:
    """`capacity` cells; each sequence is a line of cell numbers, a cell may stand in several lines."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holders: NDArray[np.int16] = np.zeros(capacity, dtype=np.int16)
        self._free: NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self._n_free = capacity
        # When each cell was taken, counted in cells: those taken one after the other lie beside each other, as a rule.
        self._taken: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._n_taken = 0
        self._lines: dict[int, NDArray[np.int32]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Cells no sequence stands in."""
        return self._n_free

    @property
    def sequences(self) -> list[int]:
        """Those that hold a token."""
        return [sequence for sequence, length in self._lengths.items() if length]

    def open(self, sequence: int) -> None:
        """Start an empty line."""
        self._lines[sequence] = np.empty(256, dtype=np.int32)
        self._lengths[sequence] = 0

    def length(self, sequence: int) -> int:
        """Tokens in the line."""
        return self._lengths[sequence]

    def append(self, sequence: int, n: int) -> None:
        """Take `n` free cells for the end of the line; NoCellsError (nothing taken) when fewer are free."""
        if n > self._n_free:
            raise NoCellsError(f"{n} KV cells needed, {self._n_free} of {self.capacity} free")
        length = self._lengths[sequence]
        line = self._room(sequence, length + n)
        if n == 1:
            # The step of one stream: numpy's ways with many cells take longer, as the sweep over the weights has left none of
            # their code in the processor's caches.
            cell = self._free.item(self._n_free - 1)
            line[length] = cell
            self._holders[cell] = 1
            self._taken[cell] = self._n_taken
        else:
            taken = self._free[self._n_free - n : self._n_free]
            line[length : length + n] = taken
            self._holders[taken] = 1
            self._taken[taken] = np.arange(self._n_taken, self._n_taken + n)
        self._n_taken += n
        self._n_free -= n
        self._lengths[sequence] = length + n

    def runs(self, sequence: int, start: int, stop: int) -> int:
        """In how many runs the line's tokens [start, stop) were taken."""
        taken = self._taken[self._lines[sequence][start:stop]]
        return int(np.count_nonzero(np.diff(taken) != 1)) + (stop > start)

    def share(self, source: int, target: int, n: int) -> None:
        """Append the first `n` cells of `source` to the empty line `target`."""
        cells = self._lines[source][:n]
        self._room(target, n)[:n] = cells
        self._holders[cells] += 1
        self._lengths[target] = n

    def cut(self, sequence: int, n: int) -> None:
        """Let go of everything after the first `n` tokens."""
        cells = self._lines[sequence][n : self._lengths[sequence]]
        self._lengths[sequence] = n
        self._holders[cells] -= 1
        freed = cells[self._holders[cells] == 0]
        self._free[self._n_free : self._n_free + len(freed)] = freed
        self._n_free += len(freed)

    def close(self, sequence: int) -> None:
        """Let go of the whole line."""
        self.cut(sequence, 0)
        del self._lines[sequence], self._lengths[sequence]

    def check_integrity(self) -> None:
        """free + held == capacity, and no cell is both."""
        count = np.zeros(self.capacity, dtype=np.int64)
        for sequence, line in self._lines.items():
            count[line[: self._lengths[sequence]]] += 1
        assert np.array_equal(count, self._holders), "holder counts disagree with the lines"
        free = self._free[: self._n_free]
        assert len(np.unique(free)) == self._n_free, "a cell is free twice"
        assert not self._holders[free].any(), "a held cell is in the free list"
        assert int((self._holders > 0).sum()) + self._n_free == self.capacity, "cells were lost"

    def _room(self, sequence: int, n: int) -> NDArray[np.int32]:
        line = self._lines[sequence]
        if len(line) < n:
            grown = np.empty(max(n, 2 * len(line)), dtype=np.int32)
            grown[: self._lengths[sequence]] = line[: self._lengths[sequence]]
            self._lines[sequence] = line = grown
        return line
