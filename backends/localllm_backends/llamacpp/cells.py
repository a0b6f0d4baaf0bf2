"""Books on the KV cache: exact counts of cells under sharing, and the positions of tokens where
images take fewer than tokens.

llama.cpp does not say how many cells are free. The ledger mirrors what it does (seq_cp shares,
seq_rm releases a cell when its last sequence lets go), so that admission can be exact. With M-RoPE
an image of 20 tokens in 5 columns takes 5 positions, all its tokens stand at the first; in every
sequence without images token n has position n.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import BackendFailure, CannotRewindError, NoCellsError


class CellLedger:
    """`capacity` cells; each sequence is a line of cell numbers, a cell may stand in several
    lines."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holders: NDArray[np.int16] = np.zeros(capacity, dtype=np.int16)
        # Cells that no sequence stands in: so many, and which.
        self.free = capacity
        self._free: NDArray[np.int32] = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        # When each cell was taken, counted in cells: those taken one after the other lie beside
        # each other, as a rule.
        self._taken: NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._n_taken = 0
        self._lines: dict[int, NDArray[np.int32]] = {}
        self._lengths: dict[int, int] = {}

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, length in self._lengths.items() if length]

    def open(self, sequence: int) -> None:
        # What is not written to takes no memory.
        self._lines[sequence] = np.empty(self.capacity, dtype=np.int32)
        self._lengths[sequence] = 0

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def append(self, sequence: int, n: int) -> None:
        """Take `n` free cells for the end of the line; NoCellsError (nothing taken) when fewer are
        free."""
        if n > self.free:
            raise NoCellsError(f"{n} KV cells needed, {self.free} of {self.capacity} free")
        length = self._lengths[sequence]
        line = self._lines[sequence]
        if n == 1:
            # The step of one stream: numpy's ways with many cells take longer, as the sweep over
            # the weights has left none of their code in the processor's caches.
            cell = self._free.item(self.free - 1)
            line[length] = cell
            self._holders[cell] = 1
            self._taken[cell] = self._n_taken
        else:
            taken = self._free[self.free - n : self.free]
            line[length : length + n] = taken
            self._holders[taken] = 1
            self._taken[taken] = np.arange(self._n_taken, self._n_taken + n)
        self._n_taken += n
        self.free -= n
        self._lengths[sequence] = length + n

    def runs(self, sequence: int, start: int, stop: int) -> int:
        """In how many runs the line's tokens [start, stop) were taken."""
        taken = self._taken[self._lines[sequence][start:stop]]
        return int(np.count_nonzero(np.diff(taken) != 1)) + (stop > start)

    def fork(self, source: int, target: int, n: int) -> None:
        """Append the first `n` cells of `source` to the empty line `target`."""
        cells = self._lines[source][:n]
        self._lines[target][:n] = cells
        self._holders[cells] += 1
        self._lengths[target] = n

    def truncate(self, sequence: int, n: int) -> None:
        """Let go of everything after the first `n` tokens."""
        cells = self._lines[sequence][n : self._lengths[sequence]]
        self._lengths[sequence] = n
        self._holders[cells] -= 1
        freed = cells[self._holders[cells] == 0]
        self._free[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def close(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        del self._lines[sequence], self._lengths[sequence]

    def check_integrity(self) -> None:
        count = np.zeros(self.capacity, dtype=np.int64)
        for sequence, line in self._lines.items():
            count[line[: self._lengths[sequence]]] += 1
        assert np.array_equal(count, self._holders), "holder counts disagree with the lines"
        free = self._free[: self.free]
        assert len(np.unique(free)) == self.free, "a cell is free twice"
        assert not self._holders[free].any(), "a held cell is in the free list"
        assert int((self._holders > 0).sum()) + self.free == self.capacity, "cells were lost"


_PLACED = struct.Struct("<III")
_TAIL = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image from token `start` on: so many tokens, which take so many positions."""

    start: int
    n_tokens: int
    n_positions: int

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens


class Positions:
    """The images of every sequence, in order."""

    def __init__(self) -> None:
        self._images: dict[int, list[PlacedImage]] = {}

    def open(self, sequence: int) -> None:
        self._images[sequence] = []

    def at(self, sequence: int, token: int) -> int:
        """The position of token number `token`, which need not be there yet. CannotRewindError
        within an image."""
        position = token
        for image in self._images[sequence]:
            if image.stop <= token:
                position -= image.n_tokens - image.n_positions
            elif image.start < token:
                raise CannotRewindError("an image can't be cut in two")
        return position

    def last(self, sequence: int, n_tokens: int) -> int:
        """The largest position among the first `n_tokens`."""
        for image in self._images[sequence]:
            if image.stop == n_tokens:
                return self.at(sequence, image.start)
        return self.at(sequence, n_tokens) - 1

    def place(self, sequence: int, image: PlacedImage) -> None:
        """An image begins at the end of the sequence."""
        if image not in self._images[sequence]:
            self._images[sequence].append(image)

    def adopt(
        self, sequence: int, start: int, stop: int, images: Sequence[PlacedImage]
    ) -> tuple[int, int]:
        """Those of the `images` that lie in the tokens [start, stop) come behind `start` tokens;
        returns the positions of both ends."""
        for image in images:
            if start <= image.start and image.stop <= stop:
                self.place(sequence, image)
        return self.at(sequence, start), self.at(sequence, stop)

    def truncate(self, sequence: int, n_tokens: int) -> None:
        """Only the first `n_tokens` stay."""
        self.fork(sequence, sequence, n_tokens)

    def fork(self, source: int, target: int, n_tokens: int) -> None:
        self._images[target] = [i for i in self._images[source] if i.stop <= n_tokens]

    def close(self, sequence: int) -> None:
        del self._images[sequence]

    def tail(self, sequence: int, start: int, stop: int) -> bytes:
        """What goes behind exported KV of the tokens [start, stop): the images among them, and the
        largest position."""
        within = [i for i in self._images[sequence] if start <= i.start and i.stop <= stop]
        listed = b"".join(_PLACED.pack(i.start, i.n_tokens, i.n_positions) for i in within)
        return listed + _TAIL.pack(self.last(sequence, stop), len(within))


def without_tail(data: bytes | memoryview) -> tuple[memoryview, list[PlacedImage], int]:
    """Exported KV without its tail, and what that says: the images, and the largest position."""
    view = memoryview(data)
    end = len(view) - _TAIL.size
    last, count = _TAIL.unpack(view[end:]) if end >= 0 else (0, 0)
    begin = end - count * _PLACED.size
    if begin < 0:
        raise BackendFailure("this is not an exported KV block: too short")
    images = [PlacedImage(*found) for found in _PLACED.iter_unpack(view[begin:end])]
    return view[:begin], images, last
