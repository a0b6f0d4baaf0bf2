"""State of draft heads that follow a model: the tokens they have read of each sequence, and the
hidden rows for the next ones.

The heads' KV (only their own layers) must mirror the model's: the same tokens at the same
positions. Each token is read with the model's hidden row at the position before it. The model
verifies drafts from the heads like any other draft. So heads with a wrong state lower the
acceptance rate, but the output stays exact.
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
# Unread tokens after which the heads catch up, if no draft is made before. One pass over their layers
# then reads all of them. With 32, heads that were not used took 6 % of the time of a tiny model on
# MLX. Each unread token keeps its hidden row in memory.
_CATCH_UP_TOKENS = 256
# Drafts stop at a token to which the heads give a lower probability; it is not worth a row in the
# model's step. Assumed: no real heads were measured here. The engine learns from such stops as from
# rejections.
MIN_PROBABILITY = 0.4
# Probabilities are computed over this many candidates, as in llama.cpp's own driver
# (common/speculative.cpp).
CANDIDATES = 10
# Longest draft of a single head that continues from its own tokens.
LONGEST_DRAFT = 16


@dataclass
class HeadState(Generic[Row]):
    """The heads' state of a sequence.

    The heads' KV holds positions below `read`. `unread` are the tokens from there on that the model
    has read but the heads have not. `rows[i]` is the hidden row before `unread[i]`; the last row is
    the newest.
    """

    read: int
    rows: list[Row]
    unread: list[int] = field(default_factory=list)


class StatefulDraftHeads(ABC, Generic[Row]):
    """Draft heads for a backend's sequences. They belong to the backend's thread.

    `kind`: name of the type of heads. `longest`: longest draft in tokens. `first`: first position
    that the heads read, since each token needs the row before it.
    """

    kind: ClassVar[str]
    longest: int
    first: ClassVar[int] = 0

    def __init__(self, n_batch: int) -> None:
        self._n_batch = n_batch
        self.resting = False
        self._states: dict[SequenceId, HeadState[Row]] = {}
        # Sequences with tokens that the heads passed over. Their memory of them is still to be emptied.
        self._lost: set[SequenceId] = set()

    @abstractmethod
    def draft(self, wanted: Sequence[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Draft for each (sequence, its newest token, longest draft).

        The model has not read the newest token yet. A draft holds the heads' best tokens and is
        shorter if they are unsure. The heads' memory does not keep draft tokens.
        """

    @abstractmethod
    def _zero_row(self) -> Row:
        """Return the row before a position whose past is unknown (after an import or a truncation).

        It is all zeros, as at the beginning of a sequence.
        """

    @abstractmethod
    def _detached(self, row: Row) -> Row:
        """Return a copy of the row that does not keep its step's full block of rows alive."""

    @abstractmethod
    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        """Read these (sequence, index in its `unread`) in one pass; returns False on a failure."""

    @abstractmethod
    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        """Remove everything after the first `n_tokens` from the heads' memory."""

    @abstractmethod
    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        """Empty the heads' memory of a sequence. The next token they read is at `n_tokens`, without
        a past."""

    @abstractmethod
    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """Copy the heads' memory of the first `n_tokens` of `source` to the empty `target`."""

    def rest(self, resting: bool) -> None:
        """Stop following the model if `resting`: to keep rows of tokens took 1 % of a tiny model's
        step. Later drafts know only the tokens of a sequence since the rest."""
        self.resting = resting

    def open(self, sequence: SequenceId) -> None:
        self._states[sequence] = HeadState(0, [self._zero_row()])

    def close(self, sequence: SequenceId) -> None:
        self._restart(sequence, 0)
        self._lost.discard(sequence)
        self._states.pop(sequence, None)

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[Sequence[Row]]) -> None:
        """Store the tokens of `chunks`, which the model has read, with their hidden rows.

        Tokens without rows are passed over. Then let heads with too many unread tokens catch up.
        """
        late: list[SequenceId] = []
        for chunk, new_rows in zip(chunks, rows, strict=True):
            if len(new_rows) < len(chunk.tokens):
                self._pass_over(chunk)
                continue
            if chunk.media is not None:
                # Heads can't read image tokens. They restart after the image.
                self._pass_over(chunk)
                self._states[chunk.sequence].rows = [self._detached(new_rows[-1])]
                continue
            self._resume(chunk.sequence)
            state = self._states[chunk.sequence]
            state.unread.extend(chunk.tokens)
            state.rows.extend(new_rows)
            if len(state.unread) >= _CATCH_UP_TOKENS:
                late.append(chunk.sequence)
        if late:
            self.catch_up(late)

    def _pass_over(self, chunk: Chunk) -> None:
        """Do not read these tokens. The sequence then begins after them."""
        state = self._states[chunk.sequence]
        state.read += len(chunk.tokens)
        if chunk.sequence not in self._lost:
            state.read += len(state.unread)
            state.unread = []
            state.rows = [self._zero_row()]
            self._lost.add(chunk.sequence)

    def _resume(self, sequence: SequenceId) -> None:
        """Empty the heads' memory of a sequence with tokens that they passed over."""
        if sequence in self._lost:
            self._lost.discard(sequence)
            self._restart(sequence, self._states[sequence].read)

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        self._resume(sequence)
        state = self._states[sequence]
        keep = n_tokens - state.read
        if keep >= 0:
            del state.unread[keep:], state.rows[keep + 1 :]
        else:
            self._cut(sequence, n_tokens)
            self._states[sequence] = HeadState(n_tokens, [self._zero_row()])

    def fork(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """Give `target` (open, empty) the state of the first `n_tokens` of `source`."""
        self._resume(source)
        state = self._states[source]
        keep = n_tokens - state.read
        n_read = min(n_tokens, state.read)
        if n_read:
            self._copy(source, target, n_read)
        if keep >= 0:
            self._states[target] = HeadState(n_read, state.rows[: keep + 1], state.unread[:keep])
        else:
            self._states[target] = HeadState(n_read, [self._zero_row()])

    def catch_up(self, sequences: Sequence[SequenceId]) -> None:
        """Read all unread tokens of `sequences`, in as few passes as the batch size allows."""
        waiting: list[tuple[SequenceId, int]] = []
        for s in sequences:
            self._resume(s)
            state = self._states[s]
            waiting += [(s, i) for i in range(max(0, self.first - state.read), len(state.unread))]
        lost: set[SequenceId] = set()
        for begin in range(0, len(waiting), self._n_batch):
            places = waiting[begin : begin + self._n_batch]
            if not self._read(places):
                lost |= {s for s, _ in places}
        for sequence in sequences:
            state = self._states[sequence]
            state.read += len(state.unread)
            state.unread = []
            state.rows = [self._detached(state.rows[-1])]
            if sequence in lost:
                # The heads' memory of it is incomplete, so they restart after these tokens.
                self._restart(sequence, state.read)

    def forget_drafts(self, sequences: Sequence[SequenceId]) -> None:
        """Remove draft tokens of these sequences from the heads' memory."""
        for sequence in sequences:
            self._cut(sequence, self._states[sequence].read)

    @contextmanager
    def _importing(self, sequence: SequenceId, n_tokens: int) -> Iterator[None]:
        """Import KV into the heads' memory inside this block.

        The model already holds `n_tokens` imported tokens of `sequence`. If the KV does not fit the
        heads, they restart without an error.
        """
        try:
            yield
        except BackendFailure:
            self._restart(sequence, n_tokens)
        self._states[sequence] = HeadState(n_tokens, [self._zero_row()])


def join_blocks(*parts: bytes) -> bytes:
    """Append further blocks to an exported block, such as those of draft heads or of other
    machines."""
    sizes = [len(part) for part in parts[1:]]
    return b"".join([*parts, struct.pack(f"<{len(sizes)}Q", *sizes)])


def split_blocks(data: bytes | memoryview, n: int) -> list[memoryview]:
    """Split data from `join_blocks` into its `n` parts. Raises BackendFailure if that is
    impossible."""
    view = memoryview(data).cast("B")
    tail = struct.Struct(f"<{n - 1}Q")
    end = len(view) - tail.size
    if end < 0:
        raise BackendFailure(
            "the data is not an exported KV block with the expected number of parts"
        )
    sizes = tail.unpack_from(view, end)
    first = end - sum(sizes)
    if first < 0:
        raise BackendFailure(
            "the data is not an exported KV block with the expected number of parts"
        )
    edges = accumulate((first, *sizes), initial=0)
    return [view[start:stop] for start, stop in pairwise(edges)]
