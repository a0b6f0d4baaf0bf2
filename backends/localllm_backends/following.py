"""Draft heads as followers of a model: what they have read of each sequence, and with which of its
hidden rows they read on.

Their small KV (the heads' layers only) must hold what the model's holds: the same tokens at the
same places, each read with a row of what the model knew just before it. What is guessed is verified
by the model like any other draft, so heads that lost their place cost acceptance and never
exactness.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import ClassVar, Generic, TypeVar

from localllm_backends.contract import BackendFailure, Chunk, SequenceId

Row = TypeVar("Row")
# Tokens that heads may lag behind before they read them: one sweep over their layers for all, and
# none for rejected drafts.
_CATCH_UP_TOKENS = 32
# Guesses that the heads themselves take for less likely than this are not worth a row of the
# model's sweep. Assumed: no real heads were measured here, and the engine learns from the stops as
# it does from rejections.
LEAST_PROBABILITY = 0.4
# Probabilities are taken among as many candidates, as in llama.cpp's own driver
# (common/speculative.cpp).
CANDIDATES = 10
# The longest draft of a single head that guesses on from its own guesses.
LONGEST_DRAFT = 16


@dataclass
class HeadsLine(Generic[Row]):
    """A sequence as the heads know it: their KV holds positions below `read`; `unread` are the
    tokens from there on that the model has read and they have not. `rows[i]` is the hidden row
    before `unread[i]`; the last one is the newest."""

    read: int
    rows: list[Row]
    unread: list[int] = field(default_factory=list)


class FollowingHeads(ABC, Generic[Row]):
    """Heads beside a backend's sequences. Belongs to the backend's thread.

    `kind`: what they are called; `longest`: their longest draft, in tokens. `first`: the first
    position that they read a token at, since a row must lie before it."""

    kind: ClassVar[str]
    longest: int
    first: ClassVar[int] = 0

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self._lines: dict[SequenceId, HeadsLine[Row]] = {}

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Guesses for each (sequence, its newest token, which the model has not read, most tokens):
        the heads' best, shorter where they are not sure. Nothing of them stays in the heads'
        memory."""

    @abstractmethod
    def _zero_row(self) -> Row:
        """The row before a position whose past was not seen (imported, or cut back to): zeros, as
        at the beginning."""

    @abstractmethod
    def _detached(self, row: Row) -> Row:
        """That row, no longer part of its step's whole block."""

    @abstractmethod
    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        """One sweep over these (sequence, index among its unread); False where it failed."""

    @abstractmethod
    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        """Take out of the heads' memory what lies behind the first `n_tokens`."""

    @abstractmethod
    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        """Empty the heads' memory of it: what they read next stands at `n_tokens`, and has no
        past."""

    @abstractmethod
    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """The empty `target` begins with what the heads' memory holds of the first `n_tokens` of
        `source`."""

    def open(self, sequence: SequenceId) -> None:
        self._lines[sequence] = HeadsLine(0, [self._zero_row()])

    def close(self, sequence: SequenceId) -> None:
        self._restart(sequence, 0)
        self._lines.pop(sequence, None)

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[Sequence[Row]]) -> None:
        """The model has read `chunks`, and knew these rows at their tokens: keep them, and read
        what has piled up."""
        late: list[SequenceId] = []
        for chunk, known in zip(chunks, rows, strict=True):
            line = self._lines[chunk.sequence]
            if chunk.image is not None:
                # Its tokens are none that heads could read: they begin anew behind it.
                end = line.read + len(line.unread) + len(chunk.tokens)
                self._restart(chunk.sequence, end)
                self._lines[chunk.sequence] = HeadsLine(end, [self._detached(known[-1])])
                continue
            line.unread.extend(chunk.tokens)
            line.rows.extend(known)
            if len(line.unread) >= _CATCH_UP_TOKENS:
                late.append(chunk.sequence)
        self.catch_up(late)

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        line = self._lines[sequence]
        keep = n_tokens - line.read
        if keep >= 0:
            del line.unread[keep:], line.rows[keep + 1 :]
        else:
            self._cut(sequence, n_tokens)
            self._lines[sequence] = HeadsLine(n_tokens, [self._zero_row()])

    def fork(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """`target` (open, empty) begins with the first `n_tokens` of `source`."""
        line = self._lines[source]
        keep = n_tokens - line.read
        held = min(n_tokens, line.read)
        if held:
            self._copy(source, target, held)
        if keep >= 0:
            self._lines[target] = HeadsLine(held, line.rows[: keep + 1], line.unread[:keep])
        else:
            self._lines[target] = HeadsLine(held, [self._zero_row()])

    def catch_up(self, sequences: Sequence[SequenceId]) -> None:
        """Read everything unread of `sequences`, in as few sweeps as the batch allows."""
        waiting: list[tuple[SequenceId, int]] = []
        for s in sequences:
            line = self._lines[s]
            waiting += [(s, i) for i in range(max(0, self.first - line.read), len(line.unread))]
        lost: set[SequenceId] = set()
        for begin in range(0, len(waiting), self._n_batch):
            places = waiting[begin : begin + self._n_batch]
            if not self._read(places):
                lost |= {s for s, _ in places}
        for sequence in sequences:
            line = self._lines[sequence]
            line.read += len(line.unread)
            line.unread = []
            line.rows = [self._detached(line.rows[-1])]
            if sequence in lost:
                # What is left of it has no past then: it begins anew behind that.
                self._restart(sequence, line.read)

    def forget_drafts(self, sequences: Sequence[SequenceId]) -> None:
        """Take out of the memory what is not part of these sequences."""
        for sequence in sequences:
            self._cut(sequence, self._lines[sequence].read)

    @contextmanager
    def _importing(self, sequence: SequenceId, n_tokens: int) -> Iterator[None]:
        """The model holds `n_tokens` of `sequence` that came from elsewhere, and the block is about
        to give the heads' memory the same. KV that does not fit is forgotten, not an error."""
        try:
            yield
        except BackendFailure:
            self._restart(sequence, n_tokens)
        self._lines[sequence] = HeadsLine(n_tokens, [self._zero_row()])


def joined(*parts: bytes) -> bytes:
    """An exported block with others behind it: that of its draft heads, or other machines'."""
    sizes = [len(part) for part in parts[1:]]
    return b"".join([*parts, struct.pack(f"<{len(sizes)}Q", *sizes)])


def parted(data: bytes | memoryview, n: int) -> list[memoryview]:
    """The `n` parts that `joined` was given; BackendFailure where that can't be."""
    view = memoryview(data).cast("B")
    tail = struct.Struct(f"<{n - 1}Q")
    end = len(view) - tail.size
    if end < 0:
        raise BackendFailure("this is not an exported KV block of as many parts")
    sizes = tail.unpack_from(view, end)
    first = end - sum(sizes)
    if first < 0:
        raise BackendFailure("this is not an exported KV block of as many parts")
    edges = accumulate((first, *sizes), initial=0)
    return [view[start:stop] for start, stop in pairwise(edges)]
