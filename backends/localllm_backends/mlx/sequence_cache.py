"""Sequences (`SequenceCache`), and the buffers of one or several sequences for a model call
(`SequenceBatch`).

A `Layout` is the result of `model.make_cache()`, reduced to three kinds of leaf: attention over
everything, attention over a window, and recurrent state. The last is mlx-lm's own ArraysCache, a
few arrays that each step replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from localllm_backends.contract import LoadError
from localllm_backends.mlx.attention import Attention, KvFormat, RowOffsets, phase_of

# A new batch copies its rows, and waits for the copies each time they reach this size.
_COPIED_AT_ONCE_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Leaf:
    """One layer's memory: keys and values of all tokens or of a `window`, or `n_arrays` recurrent
    arrays."""

    window: int | None = None
    n_arrays: int = 0

    @property
    def keeps_tokens(self) -> bool:
        return self.window is None and not self.n_arrays


class Layout:
    """A model's leaves, and the storage format of its keys and values.

    `slack`: tokens that can be taken back in a window.
    """

    def __init__(self, caches: Sequence[Any], form: KvFormat, slack: int) -> None:
        # For each layer the length of its list of caches; 0: one cache, not a list.
        self._grouped: list[int] = []
        self.leaves: list[Leaf] = []
        for cache in caches:
            if isinstance(cache, CacheList):
                self._grouped.append(len(cache.caches))
                self.leaves += [_leaf(each) for each in cache.caches]
            else:
                self._grouped.append(0)
                self.leaves.append(_leaf(cache))
        self.form = form
        self.slack = slack
        self.windows = sorted({leaf.window for leaf in self.leaves if leaf.window is not None})
        self.recurrent = any(leaf.n_arrays for leaf in self.leaves)

    @property
    def plain(self) -> bool:
        """True if every leaf can be truncated to any length."""
        return not self.windows and not self.recurrent

    def build(self, rows: Mapping[int | None, RowOffsets]) -> tuple[list[Any], list[Any]]:
        """Return the caches as the model takes them, and the same leaves as a flat list.

        `rows`: the positions for each window.
        """
        flat: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            if leaf.n_arrays:
                flat.append(ArraysCache(leaf.n_arrays))
            else:
                flat.append(Attention(self.form, rows[leaf.window], phase_of(i)))
        rest = iter(flat)
        caches: list[Any] = []
        for n in self._grouped:
            if n:
                caches.append(CacheList(*islice(rest, n)))
            else:
                caches.append(next(rest))
        return caches, flat


def _leaf(cache: Any) -> Leaf:
    """Return the leaf for mlx-lm's `cache` of a layer. Raises LoadError for an unknown type."""
    name = type(cache).__name__
    if name in ("KVCache", "ConcatenateKVCache"):
        return Leaf()
    if name == "RotatingKVCache" and not cache.keep:
        return Leaf(window=int(cache.max_size))
    if isinstance(cache, ArraysCache):
        return Leaf(n_arrays=len(cache.cache))
    raise LoadError(f"this model keeps its memory in a {name}, which the MLX backend does not know")


def arrays_of(leaves: Iterable[Any]) -> list[Any]:
    """Return every array of `leaves`. A step is finished when all of them are computed."""
    found: list[Any] = []
    for leaf in leaves:
        held = leaf.cache if isinstance(leaf, ArraysCache) else leaf.planes or ()
        found.extend(a for a in held if a is not None)
    return found


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
    alone or with other sequences.
    """

    id: int
    layout: Layout
    length: int = 0
    replay: list[int] = field(default_factory=list)
    undo: Undo | None = None
    predicted: int | None = None
    # The engine took the best token of the last step.
    follows_best: bool = False
    broken: bool = False
    # For each image with fewer positions than tokens: its end, and the difference.
    images: list[tuple[int, int]] = field(default_factory=list)

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
        return self.batch.lines.index(self)

    def position(self, n_tokens: int) -> int:
        """Return the position of the token after the first `n_tokens`."""
        return n_tokens - sum(fewer for stop, fewer in self.images if stop <= n_tokens)

    def cut_images(self, n_tokens: int) -> None:
        self.images = [image for image in self.images if image[0] <= n_tokens]

    def holds(self, n_tokens: int) -> bool:
        """Return whether the attention leaves can be truncated to `n_tokens`."""
        return all(rows.holds(self.row, n_tokens) for rows in self.batch.rows.values())

    def place(self, n_tokens: int) -> None:
        self.batch.offsets[self.row] = n_tokens

    def leave_batch(self) -> None:
        """Move to buffers of its own. The next `hold` frees its old row."""
        batch = self.batch
        if len(batch.lines) > 1:
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
        self.batch = SequenceBatch(self.layout, [self])
        batch.free()
        for rows in self.batch.rows.values():
            rows.starts = [start]
        self.continue_at(start)

    def start_of(self, i: int) -> int:
        """Return the position of the first slot of attention leaf number `i`."""
        return int(self.leaves[i].rows.starts[self.row])

    def planes_of(self, i: int, start: int, stop: int) -> list[Any]:
        """Return positions [start, stop) of attention leaf number `i`, as views."""
        row = self.row
        first = self.start_of(i)
        begin = start - first
        end = stop - first
        return [plane[row : row + 1, :, begin:end, :] for plane in self.leaves[i].planes]

    def fork_into(self, other: SequenceCache, n_tokens: int) -> None:
        """Give the empty `other` the first `n_tokens`. Buffers are shared until one of the two
        writes."""
        other.batch = self.batch.copy_of(self, other)
        other.length = n_tokens
        other.images = self.images
        other.cut_images(n_tokens)
        other.replay = list(self.replay)
        other.place(other.computed)


class SequenceBatch:
    """Sequences in one set of buffers: a single one, or several that keep decoding together.

    `caches` are the model's argument, `leaves` the same as a flat list.
    """

    def __init__(self, layout: Layout, lines: Sequence[SequenceCache] = ()) -> None:
        self.layout = layout
        self.lines = list(lines)
        self.offsets = [0] * len(lines)
        self.rows = {w: RowOffsets(w, self.offsets) for w in (None, *layout.windows)}
        self.caches, self.leaves = layout.build(self.rows)
        # Identity of the buffers, so that shared buffers are counted once.
        self.buffers = object()

    @property
    def states(self) -> list[Any]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArraysCache)]

    def snapshot(self) -> list[list[Any]]:
        """Return the arrays of its recurrent state."""
        return [list(leaf.cache) for leaf in self.states]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        for leaf, arrays in zip(self.states, state, strict=True):
            leaf.cache = list(arrays)

    # --- members ----------------------------------------------------------------------------------

    def is_of(self, lines: Sequence[SequenceCache]) -> bool:
        here = [line for line in self.lines if line.batch is self]
        return len(here) == len(self.lines) == len(lines) and set(here) == set(lines)

    def gather(
        self, lines: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]
    ) -> tuple[SequenceBatch, list[int], Any]:
        """Form a batch of exactly `lines`: this one, or a sequence's own batch if there is only
        one.

        Returns the batch, for each row the index of its sequence in `lines`, and the `tokens` in
        row order, padded to the longest.
        """
        if len(lines) == 1:
            lines[0].leave_batch()
        else:
            self.hold(lines)
        rows = [line.row for line in lines]
        order = sorted(range(len(lines)), key=rows.__getitem__)
        longest = max(len(row) for row in tokens)
        ids = []
        for i in order:
            padding = [0] * (longest - len(tokens[i]))
            ids.append([*tokens[i], *padding])
        return lines[0].batch, order, mx.array(ids)

    def hold(self, lines: Sequence[SequenceCache]) -> None:
        """Hold exactly `lines`. Sequences that leave get buffers of their own."""
        if self.is_of(lines):
            return
        for line in self.lines:
            if line.batch is self and line not in lines:
                line.leave_batch()
        # Each sequence's present place: a row of this batch, or its own batch.
        sources = [(line.batch, line.row) for line in lines]
        self._collect(sources)
        self._stand_as(sources)
        for line in lines:
            line.batch = self
        self.lines = list(lines)

    def _stand_as(self, sources: Sequence[tuple[SequenceBatch, int]]) -> None:
        """Copy the positions of the rows from `sources`."""
        self.offsets[:] = [batch.offsets[row] for batch, row in sources]
        for window, rows in self.rows.items():
            rows.starts = [batch.rows[window].starts[row] for batch, row in sources]

    def _collect(self, sources: Sequence[tuple[SequenceBatch, int]]) -> None:
        """Fill the leaves from rows of other batches.

        Several small layers are copied at a time, so that few bytes are held twice.
        """
        copied: list[Any] = []
        for n, leaf in enumerate(self.leaves):
            held = [(batch.leaves[n], row) for batch, row in sources]
            if isinstance(leaf, ArraysCache):
                states = [_row_of(theirs.cache, row) for theirs, row in held]
                joined = []
                for parts in zip(*states, strict=True):
                    # A single row would still be a view.
                    joined.append(mx.contiguous(mx.concatenate(list(parts), axis=0)))
                leaf.cache = joined
            else:
                leaf.fill([theirs.row(row) for theirs, row in held])
                for batch, _ in sources:
                    # Free memory that moved here.
                    if batch is not self and len(batch.lines) == 1:
                        batch.leaves[n].planes = None
            copied += arrays_of([leaf])
            if sum(int(a.nbytes) for a in copied) > _COPIED_AT_ONCE_BYTES:
                mx.eval(copied)
                copied = []
        mx.async_eval(copied)

    def copy_of(self, line: SequenceCache, owner: SequenceCache) -> SequenceBatch:
        """Return a batch for `owner` with only the row of `line`.

        Buffers are shared if they contain no other rows.
        """
        own = SequenceBatch(self.layout, [owner])
        own._stand_as([(self, line.row)])
        if len(self.lines) > 1:
            own._collect([(self, line.row)])
            # Until it is computed, a copy keeps the batch's buffers alive, and the next step could
            # not reuse them.
            mx.eval(arrays_of(own.leaves))
            return own
        own.buffers = self.buffers
        own.restore(self.snapshot())
        for mine, theirs in zip(self.leaves, own.leaves, strict=True):
            if isinstance(mine, Attention):
                theirs.share(mine)
        return own

    def free(self) -> None:
        """Call this when a sequence has left. The last one frees the buffers."""
        if not any(line.batch is self for line in self.lines):
            self.lines = []
            self.caches, self.leaves = self.layout.build(self.rows)

    # --- positions --------------------------------------------------------------------------------

    def make_room(self, n: int) -> None:
        """Make room for `n` more tokens in every row, which will be written next.

        Full windows lose tokens that are no longer attended to.
        """
        self.buffers = object()
        for window, rows in self.rows.items():
            leaves = [x for x in self.leaves if isinstance(x, Attention) and x.rows is rows]
            if window is not None and max(rows.used()) + n > leaves[0].slots:
                kept = window - 1 + self.layout.slack
                drops = [max(0, used - kept) for used in rows.used()]
                if any(drops):
                    for leaf in leaves:
                        leaf.drop_front(drops)
                rows.starts = [s + d for s, d in zip(rows.starts, drops, strict=True)]
            used = max(rows.used())
            for leaf in leaves:
                leaf.make_room(used, n)

    def advance(self, counts: Sequence[int]) -> None:
        """Move the end of row i by `counts[i]` tokens, after a model call."""
        self.offsets[:] = [o + n for o, n in zip(self.offsets, counts, strict=True)]
        for leaf in self.leaves:
            if isinstance(leaf, Attention):
                leaf.written = 0
