"""Bookkeeping of the KV cache: exact counts of shared cells, and positions of tokens after images.

llama.cpp does not report how many cells are free. The ledger mirrors its rules, so that admission
can be exact: seq_cp shares cells, and seq_rm frees a cell when its last sequence releases it. With
M-RoPE, an image of 20 tokens in 5 columns takes 5 positions, and all its tokens are at the first
one. In a sequence without images, token n has position n.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import NamedTuple

from localllm_backends.contract import CannotRewindError


class PlacedMedia(NamedTuple):
    """An image from token `start` on. It takes `n_tokens` tokens and `n_positions` positions."""

    start: int
    n_tokens: int
    n_positions: int

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens


class CellLedger:
    """Tracks `capacity` cells. Each sequence is a list of cells, and sequences may share cells.

    Cells are numbered as they are taken, and a number is never reused. Cells with consecutive
    numbers are usually adjacent in memory.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._n_taken = 0
        self._sequences: dict[int, list[int]] = {}
        # For each shared cell: the number of its sequences minus one.
        self._shared: Counter[int] = Counter()
        # For each sequence: its images that take fewer positions than tokens, in order.
        self._images: dict[int, list[PlacedMedia]] = {}

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, cells in self._sequences.items() if cells]

    def open(self, sequence: int) -> None:
        self._sequences[sequence] = []
        self._images[sequence] = []

    def length(self, sequence: int) -> int:
        return len(self._sequences[sequence])

    def append(self, sequence: int, n: int) -> None:
        """Take `n` free cells for the end of the sequence."""
        self._sequences[sequence].extend(range(self._n_taken, self._n_taken + n))
        self._n_taken += n
        self.free -= n

    def runs(self, sequence: int, start: int, stop: int) -> int:
        """Return the number of runs of consecutive cells that hold tokens [start, stop)."""
        cells = self._sequences[sequence][start:stop]
        if not cells:
            return 0
        breaks = sum(after != before + 1 for before, after in pairwise(cells))
        return breaks + 1

    def fork(self, source: int, target: int, n: int) -> None:
        """Give the empty `target` the first `n` cells of `source`."""
        cells = self._sequences[source][:n]
        self._sequences[target].extend(cells)
        self._shared.update(cells)
        self._images[target] = self.images_in(source, 0, n)

    def truncate(self, sequence: int, n: int) -> None:
        """Release everything after the first `n` tokens."""
        cells = self._sequences[sequence]
        for cell in cells[n:]:
            others = self._shared.pop(cell, 0)
            if others > 1:
                self._shared[cell] = others - 1
            elif not others:
                self.free += 1
        del cells[n:]
        self._images[sequence] = self.images_in(sequence, 0, n)

    def close(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        del self._sequences[sequence], self._images[sequence]

    def position(self, sequence: int, token: int) -> int:
        """Return the position of token number `token`, which need not exist yet.

        Raises CannotRewindError if the token is inside an image.
        """
        position = token
        for image in self._images[sequence]:
            if image.stop <= token:
                position -= image.n_tokens - image.n_positions
            elif image.start < token:
                raise CannotRewindError("a sequence can't be truncated inside an image")
        return position

    def last_position(self, sequence: int, n_tokens: int) -> int:
        """Return the largest position among the first `n_tokens`."""
        for image in self._images[sequence]:
            if image.stop == n_tokens:
                return self.position(sequence, image.start)
        return self.position(sequence, n_tokens) - 1

    def place(self, sequence: int, image: PlacedMedia) -> None:
        """Record an image that starts at the end of the sequence."""
        if image not in self._images[sequence]:
            self._images[sequence].append(image)

    def images_in(self, sequence: int, start: int, stop: int) -> list[PlacedMedia]:
        """Return the images that are completely within tokens [start, stop)."""
        return [i for i in self._images[sequence] if start <= i.start and i.stop <= stop]

    def check_integrity(self) -> None:
        holders = Counter(chain.from_iterable(self._sequences.values()))
        assert holders - Counter(holders.keys()) == self._shared, (
            "holder counts disagree with the sequences"
        )
        assert len(holders) + self.free == self.capacity, "cells were lost"
