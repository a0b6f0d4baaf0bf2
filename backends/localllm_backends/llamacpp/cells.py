"""Books on the KV cache: exact counts of cells under sharing, and the positions of tokens where
images take fewer than tokens.

llama.cpp does not say how many cells are free. The ledger mirrors what it does (seq_cp shares,
seq_rm releases a cell when its last sequence lets go), so that admission can be exact. With M-RoPE
an image of 20 tokens in 5 columns takes 5 positions, all its tokens stand at the first; in every
sequence without images token n has position n.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import NamedTuple

from localllm_backends.contract import CannotRewindError


class PlacedImage(NamedTuple):
    """An image from token `start` on: so many tokens, which take so many positions."""

    start: int
    n_tokens: int
    n_positions: int

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens


class CellLedger:
    """`capacity` cells; each sequence is a line of cells, and a cell may stand in several lines.
    They are numbered as they are taken, and a number is never given again: cells that are taken one
    after the other lie beside each other, as a rule."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._n_taken = 0
        self._lines: dict[int, list[int]] = {}
        # Of cells that stand in several lines in how many besides one.
        self._shared: Counter[int] = Counter()
        # Of every sequence, in order, where they take fewer positions than tokens.
        self._images: dict[int, list[PlacedImage]] = {}

    @property
    def sequences(self) -> list[int]:
        return [sequence for sequence, line in self._lines.items() if line]

    def open(self, sequence: int) -> None:
        self._lines[sequence] = []
        self._images[sequence] = []

    def length(self, sequence: int) -> int:
        return len(self._lines[sequence])

    def append(self, sequence: int, n: int) -> None:
        """Take `n` cells for the end of the line, of those that are `free`."""
        self._lines[sequence].extend(range(self._n_taken, self._n_taken + n))
        self._n_taken += n
        self.free -= n

    def runs(self, sequence: int, start: int, stop: int) -> int:
        """In how many runs the line's tokens [start, stop) were taken."""
        taken = self._lines[sequence][start:stop]
        if not taken:
            return 0
        breaks = sum(after != before + 1 for before, after in pairwise(taken))
        return breaks + 1

    def fork(self, source: int, target: int, n: int) -> None:
        """The empty line `target` begins with the first `n` cells of `source`."""
        cells = self._lines[source][:n]
        self._lines[target].extend(cells)
        self._shared.update(cells)
        self._images[target] = self.images_in(source, 0, n)

    def truncate(self, sequence: int, n: int) -> None:
        """Let go of everything after the first `n` tokens."""
        line = self._lines[sequence]
        for cell in line[n:]:
            others = self._shared.pop(cell, 0)
            if others > 1:
                self._shared[cell] = others - 1
            elif not others:
                self.free += 1
        del line[n:]
        self._images[sequence] = self.images_in(sequence, 0, n)

    def close(self, sequence: int) -> None:
        self.truncate(sequence, 0)
        del self._lines[sequence], self._images[sequence]

    def position(self, sequence: int, token: int) -> int:
        """That of token number `token`, which need not be there yet. CannotRewindError within an
        image."""
        position = token
        for image in self._images[sequence]:
            if image.stop <= token:
                position -= image.n_tokens - image.n_positions
            elif image.start < token:
                raise CannotRewindError("an image can't be cut in two")
        return position

    def last_position(self, sequence: int, n_tokens: int) -> int:
        """The largest among the first `n_tokens`."""
        for image in self._images[sequence]:
            if image.stop == n_tokens:
                return self.position(sequence, image.start)
        return self.position(sequence, n_tokens) - 1

    def place(self, sequence: int, image: PlacedImage) -> None:
        """An image begins at the end of the sequence."""
        if image not in self._images[sequence]:
            self._images[sequence].append(image)

    def images_in(self, sequence: int, start: int, stop: int) -> list[PlacedImage]:
        """The images among the tokens [start, stop)."""
        return [i for i in self._images[sequence] if start <= i.start and i.stop <= stop]

    def check_integrity(self) -> None:
        held = Counter(chain.from_iterable(self._lines.values()))
        assert held - Counter(held.keys()) == self._shared, "holder counts disagree with the lines"
        assert len(held) + self.free == self.capacity, "cells were lost"
