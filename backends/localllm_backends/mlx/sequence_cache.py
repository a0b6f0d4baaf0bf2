"""Sequences (`SequenceCache`), and the buffers of one or several sequences for a model call
(`SequenceBatch`).

A `Layout` is the result of `model.make_cache()`, reduced to three kinds of leaf: attention over
everything, attention over a window, and recurrent state. The last is mlx-lm's own ArraysCache, a
few arrays that each step replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from localllm_backends.mlx.attention import Attention, RowOffsets
from localllm_backends.mlx.layout import Layout, arrays_of
from localllm_backends.mlx.shared_prefix import (
    COPIED_TOKENS,
    LONG_CHAIN,
    Chain,
    Segment,
    SegmentPart,
    chain_order,
    chain_tokens,
    cut_chain,
    end_to_end,
    grouped,
    positions_of,
    uses_shared,
)

# A new batch copies its rows, and waits for the copies each time they reach this size.
_COPIED_AT_ONCE_BYTES = 2**28


@dataclass(slots=True)
class Undo:
    """Data for taking tokens back from recurrent state: the state before a chunk, and the chunk."""

    length: int
    tokens: Sequence[int]
    state: list[list[Any]]


def row_of_state(state: Sequence[Sequence[Any]], row: int) -> list[list[Any]]:
    """Return one row of `SequenceBatch.snapshot`."""
    return [_row_of(arrays, row) for arrays in state]


def _row_of(arrays: Sequence[Any], row: int) -> list[Any]:
    return [None if a is None else a[row : row + 1] for a in arrays]


@dataclass(eq=False)
class SequenceCache:
    """One sequence.

    `length` is the contract's length. `replay` are tokens that recurrent memory must read again
    after it was reset to an older state; they precede the next chunk. `batch` holds its memory,
    alone or with other sequences. `scales` are those of the adapters that computed its tokens.
    `uncounted`: tokens in its own buffers that were copied for a fork, and take no cells.
    """

    id: int
    layout: Layout
    length: int = 0
    replay: list[int] = field(default_factory=list)
    scales: tuple[float, ...] = ()
    undo: Undo | None = None
    predicted: int | None = None
    # The engine took the best token of the last step.
    follows_best: bool = False
    broken: bool = False
    # For each image with fewer positions than tokens: its end, and the difference.
    images: list[tuple[int, int]] = field(default_factory=list)
    uncounted: int = 0

    def __post_init__(self) -> None:
        self.batch = SequenceBatch(self.layout, [self])

    @property
    def computed(self) -> int:
        """Number of tokens in the buffers."""
        return self.length - len(self.replay)

    @property
    def leaves(self) -> list[Any]:
        return self.batch.leaves

    @property
    def row(self) -> int:
        """Its row in the batch."""
        return self.batch.seqs.index(self)

    @property
    def chain(self) -> Chain:
        """The segments with its first tokens. The next tokens are in its own buffers."""
        return self.batch.chains[self.row]

    def position(self, n_tokens: int) -> int:
        """Return the position of the token after the first `n_tokens`."""
        return n_tokens - sum(fewer for stop, fewer in self.images if stop <= n_tokens)

    def cut_images(self, n_tokens: int) -> None:
        self.images = [image for image in self.images if image[0] <= n_tokens]

    def holds(self, n_tokens: int) -> bool:
        """Return whether the attention leaves can be truncated to `n_tokens`."""
        return all(rows.holds(self.row, n_tokens) for rows in self.batch.rows.values())

    def place(self, n_tokens: int) -> None:
        """Set the position of the next token. Tokens in segments after it are given up."""
        chain = self.chain
        if n_tokens < chain_tokens(chain):
            self.leave_batch()
            self.batch.use_chain(cut_chain(chain, n_tokens))
            self.batch.empty()
            for part in chain:
                part.segment.shrink()
        n_own = n_tokens - chain_tokens(self.chain)
        self.uncounted = max(0, min(self.uncounted, n_own))
        self.batch.offsets[self.row] = n_tokens

    def leave_batch(self) -> None:
        """Move to buffers of its own. The next `hold` frees its old row."""
        batch = self.batch
        if len(batch.seqs) > 1:
            self.batch = batch.copy_of(self, self)
            batch.free()

    def continue_at(self, n_tokens: int) -> None:
        """Set the length to `n_tokens` after its buffers were filled."""
        self.length = n_tokens
        self.replay = []
        self.undo = None
        self.predicted = None
        self.place(n_tokens)
        self.cut_images(n_tokens)
        self.batch.buffers = object()

    def clear(self, start: int = 0) -> None:
        """Remove everything. The next token is at position `start`."""
        batch = self.batch
        chain = self.chain
        self.batch = SequenceBatch(self.layout, [self])
        batch.free()
        for part in chain:
            part.segment.shrink()
        for rows in self.batch.rows.values():
            rows.starts = [start]
        self.continue_at(start)

    def start_of(self, i: int) -> int:
        """Return the position of the first slot of attention leaf number `i`."""
        return int(self.leaves[i].rows.starts[self.row])

    def planes_of(self, i: int, start: int, stop: int) -> list[Any]:
        """Return positions [start, stop) of attention leaf number `i`, as views if possible."""
        row = self.row
        first = self.start_of(i)
        pieces: list[list[Any]] = []
        if start < first and self.layout.leaves[i].keeps_tokens:
            pieces += positions_of(self.chain, i, start, stop)
        if stop > first:
            begin = max(0, start - first)
            end = stop - first
            pieces.append([p[row : row + 1, :, begin:end, :] for p in self.leaves[i].planes])
        return end_to_end(pieces)

    def move_to_segment(self, n_tokens: int) -> None:
        """Move its own buffers with all tokens up to `n_tokens`, or up to the end, to a new segment.

        A few tokens at the end stay its own.
        """
        self.leave_batch()
        batch = self.batch
        start = chain_tokens(self.chain)
        n_own = batch.offsets[0] - start
        n_moved = n_tokens - start
        n_kept = n_own - n_moved
        if n_kept > COPIED_TOKENS:
            n_moved = n_own
            n_kept = 0
        leaves = batch.own_leaves
        segment = Segment({leaf.number: leaf.planes for leaf in leaves}, self.uncounted)
        self.uncounted = 0
        rest: list[list[Any]] = []
        for leaf in leaves:
            rest.append([plane[:, :, n_moved:n_own] for plane in leaf.planes])
        batch.use_chain((*self.chain, SegmentPart(segment, n_moved)))
        batch.empty()
        if n_kept:
            for leaf, own_end in zip(leaves, rest, strict=True):
                leaf.fill([own_end])
            mx.eval(arrays_of(leaves))

    def fork_into(self, other: SequenceCache, n_tokens: int) -> None:
        """Give the empty `other` the first `n_tokens`.

        If the layout shares, they become a segment of both, except for a few. Otherwise buffers are
        shared until one of the two writes.
        """
        if self.layout.shares:
            self._share(other, min(n_tokens, self.computed))
        else:
            other.batch = self.batch.copy_of(self, other)
        other.length = n_tokens
        other.images = self.images
        other.cut_images(n_tokens)
        other.replay = list(self.replay)
        other.scales = self.scales
        other.place(other.computed)

    def _share(self, other: SequenceCache, n_tokens: int) -> None:
        """Give `other` the segments of the first `n_tokens`, and a copy of a few tokens."""
        if n_tokens - chain_tokens(self.chain) > COPIED_TOKENS:
            self.move_to_segment(n_tokens)
        chain = cut_chain(self.chain, n_tokens)
        n_copied = n_tokens - chain_tokens(chain)
        other.batch = self.batch.copy_of(self, other, n_copied)
        other.batch.use_chain(chain)
        other.uncounted = n_copied


class SequenceBatch:
    """Sequences in one set of buffers: a single one, or several that keep decoding together.

    `caches` are the model's argument, `leaves` the same as a flat list.
    """

    def __init__(self, layout: Layout, seqs: Sequence[SequenceCache] = ()) -> None:
        self.layout = layout
        self.seqs = list(seqs)
        self.offsets = [0] * len(seqs)
        self.rows = {w: RowOffsets(w, self.offsets) for w in (None, *layout.windows)}
        self.caches, self.leaves = layout.build(self.rows)
        self.chains: list[Chain] = [()] * len(seqs)
        # Identity of the buffers, so that shared buffers are counted once.
        self.buffers = object()

    @property
    def states(self) -> list[Any]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArraysCache)]

    @property
    def own_leaves(self) -> list[Attention]:
        """The leaves that keep every token, which can be in segments."""
        pairs = zip(self.layout.leaves, self.leaves, strict=True)
        return [cache_leaf for leaf, cache_leaf in pairs if leaf.keeps_tokens]

    def use_chain(self, *chains: Chain) -> None:
        """Set the chain of each row. The buffers start after it."""
        self.chains = list(chains)
        groups = grouped(chains)
        rows = self.rows[None]
        rows.shared = []
        if groups:
            rows.shared = [chain_tokens(chain) for chain in chains]
            rows.starts = list(rows.shared)
        for leaf in self.own_leaves:
            leaf.groups = groups
        for seq, chain in zip(self.seqs, chains, strict=True):
            for part in chain:
                part.segment.add_holder(seq)

    def empty(self) -> None:
        """Remove the tokens that are not in segments, of leaves that keep every token."""
        self.buffers = object()
        for leaf in self.own_leaves:
            leaf.planes = None

    def snapshot(self) -> list[list[Any]]:
        """Return the arrays of its recurrent state."""
        return [list(leaf.cache) for leaf in self.states]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        for leaf, arrays in zip(self.states, state, strict=True):
            leaf.cache = list(arrays)

    # --- members ----------------------------------------------------------------------------------

    def contains_exactly(self, seqs: Sequence[SequenceCache]) -> bool:
        members = [seq for seq in self.seqs if seq.batch is self]
        return len(members) == len(self.seqs) == len(seqs) and set(members) == set(seqs)

    def gather(
        self, seqs: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]
    ) -> tuple[SequenceBatch, list[int], Any]:
        """Form a batch of exactly `seqs`: this one, or a sequence's own batch if there is only
        one.

        Returns the batch, for each row the index of its sequence in `seqs`, and the `tokens` in
        row order, padded to the longest.
        """
        if len(seqs) == 1:
            seqs[0].leave_batch()
        else:
            self.hold(seqs)
        rows = [seq.row for seq in seqs]
        order = sorted(range(len(seqs)), key=rows.__getitem__)
        longest = max(len(row) for row in tokens)
        ids = []
        for i in order:
            padding = [0] * (longest - len(tokens[i]))
            ids.append([*tokens[i], *padding])
        return seqs[0].batch, order, mx.array(ids)

    def hold(self, seqs: Sequence[SequenceCache]) -> None:
        """Hold exactly `seqs`. Sequences that leave get buffers of their own."""
        if self.contains_exactly(seqs):
            return
        for seq in self.seqs:
            if seq.batch is self and seq not in seqs:
                seq.leave_batch()
        in_parts = any(uses_shared(seq) for seq in seqs)
        if in_parts:
            for seq in seqs:
                _shorten(seq)
            # Rows with the same chain are computed together.
            seqs = sorted(seqs, key=chain_order)
        chains = [seq.chain for seq in seqs]
        # Each sequence's present place: a row of this batch, or its own batch.
        sources = [(seq.batch, seq.row) for seq in seqs]
        self._collect(sources, [()] * len(seqs) if in_parts else chains)
        self._copy_positions(sources)
        for seq in seqs:
            seq.batch = self
        self.seqs = list(seqs)
        if in_parts:
            self.use_chain(*chains)
        else:
            self._use_own(chains)

    def _use_own(self, chains: Sequence[Chain]) -> None:
        """Replace the `chains` of the rows after their tokens were copied into the buffers."""
        starts = self.rows[None].starts
        for row, (seq, chain) in enumerate(zip(self.seqs, chains, strict=True)):
            starts[row] -= chain_tokens(chain)
            seq.uncounted += sum(part.segment.uncounted for part in chain)
        self.use_chain(*[() for _ in chains])

    def _copy_positions(self, sources: Sequence[tuple[SequenceBatch, int]]) -> None:
        """Copy the positions of the rows from `sources`."""
        self.offsets[:] = [batch.offsets[row] for batch, row in sources]
        for window, rows in self.rows.items():
            rows.starts = [batch.rows[window].starts[row] for batch, row in sources]

    def _collect(
        self,
        sources: Sequence[tuple[SequenceBatch, int]],
        chains: Sequence[Chain],
        max_tokens: int | None = None,
    ) -> None:
        """Fill the leaves from rows of other batches, with at most `max_tokens` tokens in leaves
        that keep every token.

        Each row gets the tokens of its segments in `chains` first. Several small layers are copied at a time,
        so that few bytes are held twice.
        """
        copied: list[Any] = []
        for n, leaf in enumerate(self.leaves):
            source_leaves = [(batch.leaves[n], row) for batch, row in sources]
            if isinstance(leaf, ArraysCache):
                leaf.cache = _joined([_row_of(theirs.cache, row) for theirs, row in source_leaves])
            else:
                rows = [theirs.row(row) for theirs, row in source_leaves]
                if self.layout.leaves[n].keeps_tokens:
                    rows = _ends_and_segments(rows, n, max_tokens, chains)
                leaf.fill(rows)
                for batch, _ in sources:
                    # Free memory that moved here.
                    if batch is not self and len(batch.seqs) == 1:
                        batch.leaves[n].planes = None
            copied += arrays_of([leaf])
            if sum(int(a.nbytes) for a in copied) > _COPIED_AT_ONCE_BYTES:
                mx.eval(copied)
                copied = []
        mx.async_eval(copied)

    def copy_of(
        self, seq: SequenceCache, owner: SequenceCache, max_tokens: int | None = None
    ) -> SequenceBatch:
        """Return a batch for `owner` with only the row of `seq`.

        Buffers are shared if they contain no other rows. With `max_tokens`, at most this many
        tokens outside of segments are copied instead.
        """
        copy = SequenceBatch(self.layout, [owner])
        copy._copy_positions([(self, seq.row)])
        copy.use_chain(self.chains[seq.row])
        if len(self.seqs) > 1:
            copy._collect([(self, seq.row)], [()], max_tokens)
            # Until it is computed, a copy keeps the batch's buffers alive, and the next step could
            # not reuse them.
            mx.eval(arrays_of(copy.leaves))
            return copy
        copy.buffers = self.buffers
        copy.restore(self.snapshot())
        for source_leaf, copy_leaf in zip(self.leaves, copy.leaves, strict=True):
            if isinstance(source_leaf, Attention):
                copy_leaf.share(source_leaf)
        if max_tokens is not None:
            copy.empty()
            for source_leaf, copy_leaf in zip(self.own_leaves, copy.own_leaves, strict=True):
                if max_tokens:
                    copy_leaf.fill([[plane[:, :, :max_tokens] for plane in source_leaf.planes]])
            # Until it is computed, the copy keeps the source's buffers from being written in place.
            mx.eval(arrays_of(copy.own_leaves))
        return copy

    def free(self) -> None:
        """Call this when a sequence has left. The last one frees the buffers."""
        if not any(seq.batch is self for seq in self.seqs):
            self.seqs = []
            self.chains = []
            self.rows[None].shared = []
            self.caches, self.leaves = self.layout.build(self.rows)

    # --- positions --------------------------------------------------------------------------------

    def make_room(self, n: int) -> None:
        """Make room for `n` more tokens in every row, which will be written next.

        Full windows lose tokens that are no longer attended to.
        """
        self.buffers = object()
        self._take_back()
        for window, rows in self.rows.items():
            leaves = [x for x in self.leaves if isinstance(x, Attention) and x.rows is rows]
            if window is not None and max(rows.used()) + n > leaves[0].slots:
                n_kept = window - 1 + self.layout.slack
                drops = [max(0, used - n_kept) for used in rows.used()]
                if any(drops):
                    for leaf in leaves:
                        leaf.drop_front(drops)
                rows.starts = [s + d for s, d in zip(rows.starts, drops, strict=True)]
            used = max(rows.used())
            for leaf in leaves:
                leaf.make_room(used, n)

    def _take_back(self) -> None:
        """Move a single row's segments to its own buffers, if no other sequence uses them."""
        if len(self.seqs) == 1 and self.chains[0] and not uses_shared(self.seqs[0]):
            self._collect([(self, 0)], self.chains)
            self._use_own(self.chains)

    def advance(self, counts: Sequence[int]) -> None:
        """Move the end of row i by `counts[i]` tokens, after a model call."""
        self.offsets[:] = [o + n for o, n in zip(self.offsets, counts, strict=True)]
        for leaf in self.leaves:
            if isinstance(leaf, Attention):
                leaf.forget_step()


def _shorten(seq: SequenceCache) -> None:
    """Move the own tokens of a long row to a segment, since rows are padded to the longest one."""
    end = seq.batch.offsets[seq.row]
    chain = seq.chain
    if end - chain_tokens(chain) > COPIED_TOKENS and len(chain) < LONG_CHAIN:
        seq.move_to_segment(end)


def _joined(states: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the recurrent arrays of one layer for all rows together."""
    joined = []
    for parts in zip(*states, strict=True):
        # A single row would still be a view.
        joined.append(mx.contiguous(mx.concatenate(list(parts), axis=0)))
    return joined


def _ends_and_segments(
    rows: Sequence[list[Any]], leaf: int, max_slots: int | None, chains: Sequence[Chain]
) -> list[list[Any]]:
    """Return at most the first `max_slots` slots of each row, after the tokens of its chain, if
    any."""
    rows_with_segments = []
    for row, chain in zip(rows, chains, strict=True):
        own_slots = [plane[:, :, :max_slots] for plane in row]
        rows_with_segments.append(end_to_end([*(part.of_leaf(leaf) for part in chain), own_slots]))
    return rows_with_segments
