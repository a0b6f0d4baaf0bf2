"""A sequence's whole memory (`Line`) and several of them laid side by side for one call of the
model (`Batch`).

A `Layout` is what `model.make_cache()` said, reduced to three kinds of leaf: attention over
everything, attention over a window, and recurrent state (mlx-lm's own ArraysCache: a few arrays
that each step replaces).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList

from localllm_backends.contract import LoadError
from localllm_backends.mlx.attention import (
    BatchAttention,
    BatchOffsets,
    KvFormat,
    LineAttention,
    phase_of,
)

# A batch that forms copies its rows, and waits for those copies whenever they come to so much.
_COPIED_AT_ONCE_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class Leaf:
    """One layer's memory: "full", "window" (with its size) or "state" (with its number of
    arrays)."""

    kind: str
    size: int = 0


class Layout:
    """The tree of leaves a model wants, and how its keys and values are stored."""

    def __init__(self, caches: Sequence[Any], form: KvFormat, slack: int) -> None:
        self._tree = [self._read(c) for c in caches]
        self.form, self.slack = form, slack
        leaves = list(_flat(self._tree))
        self.windows = sorted({leaf.size for leaf in leaves if leaf.kind == "window"})
        self.recurrent = any(leaf.kind == "state" for leaf in leaves)
        self.attention = any(leaf.kind != "state" for leaf in leaves)
        self.keeps_tokens = any(leaf.kind == "full" for leaf in leaves)

    @property
    def plain(self) -> bool:
        """True when every leaf can be cut anywhere."""
        return not self.windows and not self.recurrent

    def build(self, make: Callable[[Leaf, int], Any]) -> tuple[list[Any], list[Any]]:
        """The list of caches a model takes, and the same leaves in one flat list; `make` is told
        each one's place."""
        flat: list[Any] = []
        return [_made(node, make, flat) for node in self._tree], flat

    def line_leaf(self, leaf: Leaf, place: int) -> Any:
        if leaf.kind == "state":
            return ArraysCache(leaf.size)
        window = leaf.size if leaf.kind == "window" else None
        return LineAttention(self.form, window, self.slack, phase_of(place))

    def _read(self, cache: Any) -> Any:
        name = type(cache).__name__
        if name == "CacheList":
            return [self._read(c) for c in cache.caches]
        if name in ("KVCache", "ConcatenateKVCache"):
            return Leaf("full")
        if name == "RotatingKVCache" and not cache.keep:
            return Leaf("window", int(cache.max_size))
        if isinstance(cache, ArraysCache):
            return Leaf("state", len(cache.cache))
        raise LoadError(
            f"this model keeps its memory in a {name}, which the MLX backend does not know"
        )


def _made(node: Any, make: Callable[[Leaf, int], Any], flat: list[Any]) -> Any:
    # Not a closure that calls itself: such a cycle would keep a dropped sequence's buffers until a
    # collection.
    if isinstance(node, list):
        return CacheList(*(_made(child, make, flat) for child in node))
    flat.append(make(node, len(flat)))
    return flat[-1]


def _flat(tree: Iterable[Any]) -> Iterable[Leaf]:
    for node in tree:
        if isinstance(node, list):
            yield from _flat(node)
        else:
            yield node


def arrays_of(leaves: Iterable[Any]) -> list[Any]:
    """Every array held by `leaves`: what must be computed for a step to be finished."""
    found: list[Any] = []
    for leaf in leaves:
        held = leaf.cache if isinstance(leaf, ArraysCache) else leaf.planes or ()
        found.extend(a for a in held if a is not None)
    return found


@dataclass(slots=True)
class Undo:
    """What taking tokens back out of recurrent state needs: the state before a chunk, and the
    chunk."""

    length: int
    tokens: list[int]
    state: list[list[Any]]


class _Memory:
    """Of a line or a batch: the same leaves as `caches`, which a model takes, and flat."""

    caches: list[Any]
    leaves: list[Any]

    @property
    def states(self) -> list[Any]:
        return [leaf for leaf in self.leaves if isinstance(leaf, ArraysCache)]

    def snapshot(self) -> list[list[Any]]:
        """The arrays of its recurrent state."""
        return [list(leaf.cache) for leaf in self.states]

    def restore(self, state: Sequence[Sequence[Any]]) -> None:
        for leaf, arrays in zip(self.states, state, strict=True):
            leaf.cache = list(arrays)


def _forked(leaf: Any) -> Any:
    if isinstance(leaf, LineAttention):
        return leaf.fork()
    other = ArraysCache(len(leaf.cache))
    other.cache = list(leaf.cache)
    return other


def _rows_of(arrays: Sequence[Any], row: int) -> list[Any]:
    return [a[row : row + 1] for a in arrays]


def row_of_state(state: Sequence[Sequence[Any]], row: int) -> list[list[Any]]:
    """What `SequenceBatch.snapshot` says of one row."""
    return [_rows_of(arrays, row) for arrays in state]


@dataclass(eq=False)
class SequenceCache(_Memory):
    """One sequence. `length` is what the contract counts; `replay` are tokens of it that recurrent
    memory, having been set back to an older state, has yet to read again: they go in front of the
    next chunk."""

    id: int
    layout: Layout
    length: int = 0
    replay: list[int] = field(default_factory=list)
    undo: Undo | None = None
    batch: SequenceBatch | None = None
    predicted: int | None = None
    # The engine took the best token of its last step.
    follows_best: bool = False
    broken: bool = False
    # Of each image that takes fewer positions than tokens: where it ends, and how many fewer.
    images: list[tuple[int, int]] = field(default_factory=list)
    # Names the buffers, so that lines which still share them are counted once.
    buffers: object = field(default_factory=object)

    def __post_init__(self) -> None:
        self.caches, self.leaves = self.layout.build(self.layout.line_leaf)

    @property
    def computed(self) -> int:
        """Tokens the buffers stand for."""
        return self.length - len(self.replay)

    def position(self, n_tokens: int) -> int:
        """Where the token behind the first `n_tokens` stands."""
        return n_tokens - sum(fewer for stop, fewer in self.images if stop <= n_tokens)

    def cut_images(self, n_tokens: int) -> None:
        self.images = [image for image in self.images if image[0] <= n_tokens]

    def holds(self, n_tokens: int) -> bool:
        """Can the attention leaves be cut to `n_tokens`?"""
        if self.batch is not None:
            return self.batch.holds(self, n_tokens)
        return all(leaf.holds(n_tokens) for leaf in self.leaves if isinstance(leaf, LineAttention))

    def place(self, n_tokens: int) -> None:
        if self.batch is not None:
            self.batch.place(self, n_tokens)
            return
        for leaf in self.leaves:
            if isinstance(leaf, LineAttention):
                leaf.offset = n_tokens

    def leave_batch(self) -> None:
        """Have buffers of its own, out of the batch."""
        if self.batch is not None:
            self.batch.extract(self)

    def continue_at(self, n_tokens: int) -> None:
        """Its buffers were filled, and stand for `n_tokens`."""
        self.length, self.replay, self.undo, self.predicted = n_tokens, [], None, None
        self.cut_images(n_tokens)
        self.buffers = object()

    def clear(self) -> None:
        if self.batch is not None:
            self.batch.forget(self)
        self.caches, self.leaves = self.layout.build(self.layout.line_leaf)
        self.continue_at(0)

    def start_of(self, i: int) -> int:
        """The position of the first slot of attention leaf number `i`."""
        if self.batch is None:
            return int(self.leaves[i].start)
        return int(self.batch.leaves[i].rows.starts[self.batch.row_of(self)])

    def planes_of(self, i: int, start: int, stop: int) -> list[Any]:
        """The positions [start, stop) of attention leaf number `i`, as views."""
        planes = self.leaves[i].planes if self.batch is None else self.batch.leaves[i].planes
        first = self.start_of(i)
        rows = slice(None)
        if self.batch is not None:
            row = self.batch.row_of(self)
            rows = slice(row, row + 1)
        return [p[rows, :, start - first : stop - first, :] for p in planes]

    def fork_into(self, other: SequenceCache, n_tokens: int) -> None:
        """Make the empty line `other` hold the first `n_tokens` of this one; buffers are shared
        until one writes."""
        if self.batch is not None:
            self.batch.copy_row(self, other.leaves)
        else:
            forked = map(_forked, self.leaves)
            other.caches, other.leaves = self.layout.build(lambda _leaf, _place: next(forked))
            other.buffers = self.buffers
        other.length, other.images = n_tokens, self.images
        other.cut_images(n_tokens)
        other.replay = list(self.replay)
        other.place(other.computed)


class SequenceBatch(_Memory):
    """Lines in one set of buffers, kept from step to step while the same lines decode."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.lines: list[SequenceCache] = []
        self._clear()

    def _clear(self) -> None:
        self._rows = {w: BatchOffsets(w) for w in (None, *self.layout.windows)}
        self.caches, self.leaves = self.layout.build(self._leaf)

    def _leaf(self, leaf: Leaf, place: int) -> Any:
        if leaf.kind == "state":
            return ArraysCache(leaf.size)
        rows = self._rows[leaf.size if leaf.kind == "window" else None]
        return BatchAttention(self.layout.form, rows, phase_of(place))

    def row_of(self, line: SequenceCache) -> int:
        return self.lines.index(line)

    # --- who is in it -----------------------------------------------------------------------------

    def is_of(self, lines: Sequence[SequenceCache]) -> bool:
        here = [line for line in self.lines if line.batch is self]
        return len(here) == len(self.lines) == len(lines) and set(here) == set(lines)

    def gather(
        self, lines: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]
    ) -> tuple[list[int], Any]:
        """Hold exactly `lines`, with room for the `tokens` of each; returns the place in `lines` of
        each row's, and the tokens row by row, padded to the longest."""
        self.hold(lines)
        order = sorted(range(len(lines)), key=lambda i: self.row_of(lines[i]))
        longest = max(map(len, tokens))
        self.make_room(longest)
        return order, mx.array([[*tokens[i], *[0] * (longest - len(tokens[i]))] for i in order])

    def hold(self, lines: Sequence[SequenceCache]) -> None:
        """Hold exactly `lines`. Those that leave get buffers of their own."""
        if self.is_of(lines):
            return
        for line in self.lines:
            if line.batch is self and line not in lines:
                self.extract(line)
        # Where each is now: a row of this batch, or buffers of its own.
        sources = [(self.row_of(line) if line.batch is self else None, line) for line in lines]
        placed: list[tuple[BatchOffsets, list[tuple[int, int]]]] = []
        for rows in self._rows.values():
            placed.append((rows, [self._offset_and_start(rows, i, line) for i, line in sources]))
        self._collect(sources)
        for rows, places in placed:
            rows.offsets = [offset for offset, _ in places]
            rows.starts = [start for _, start in places]
        for row, line in sources:
            if row is None:
                line.batch = self
                line.caches, line.leaves = [], []
                line.buffers = object()
        self.lines = list(lines)

    def _collect(self, sources: Sequence[tuple[int | None, SequenceCache]]) -> None:
        """Fill the leaves from rows and lines; as many layers at a time as are small, so that
        little is ever held twice."""
        copied: list[Any] = []
        for n, leaf in enumerate(self.leaves):
            if isinstance(leaf, ArraysCache):
                held = leaf.cache
                states = [
                    _rows_of(held, i) if i is not None else line.leaves[n].cache
                    for i, line in sources
                ]
                leaf.cache = [
                    mx.concatenate(list(parts), axis=0) for parts in zip(*states, strict=True)
                ]
            else:
                rows = [
                    leaf.row(i) if i is not None else line.leaves[n].read_used()
                    for i, line in sources
                ]
                leaf.fill(rows, max(int(r[0].shape[2]) for r in rows) + 1)
            for i, line in sources:
                if i is None:
                    line.leaves[n] = None
            copied += arrays_of([leaf])
            if sum(int(a.nbytes) for a in copied) > _COPIED_AT_ONCE_BYTES:
                mx.eval(copied)
                copied = []
        mx.async_eval(copied)

    @staticmethod
    def _offset_and_start(
        rows: BatchOffsets, i: int | None, line: SequenceCache
    ) -> tuple[int, int]:
        if i is not None:
            return rows.offsets[i], rows.starts[i]
        for leaf in line.leaves:
            if isinstance(leaf, LineAttention) and leaf.window == rows.window:
                return leaf.offset, leaf.start
        return line.computed, line.computed

    def extract(self, line: SequenceCache) -> None:
        """Give `line` buffers of its own and let it go; its row is freed by the next `hold`."""
        caches, leaves = self.layout.build(self.layout.line_leaf)
        self.copy_row(line, leaves)
        line.caches, line.leaves, line.batch = caches, leaves, None
        line.buffers = object()

    def copy_row(self, line: SequenceCache, leaves: Sequence[Any]) -> None:
        """Copy `line`'s row into these empty leaves of a line."""
        i = self.row_of(line)
        for mine, theirs in zip(self.leaves, leaves, strict=True):
            if isinstance(mine, ArraysCache):
                theirs.cache = [mx.contiguous(a) for a in _rows_of(mine.cache, i)]
            else:
                theirs.write(mine.row(i), mine.rows.starts[i])
        # Until it is computed, a copy holds on to the batch's buffers, which the next step could
        # not then reuse.
        mx.eval(arrays_of(leaves))

    def forget(self, line: SequenceCache) -> None:
        """Let a dropped line go; the last one takes the buffers with it."""
        line.batch = None
        others = [other for other in self.lines if other.batch is self]
        if not others:
            self.lines = []
            self._clear()

    # --- where they stand -------------------------------------------------------------------------

    def holds(self, line: SequenceCache, n_tokens: int) -> bool:
        """Can `line` be cut to `n_tokens`?"""
        i = self.row_of(line)
        return all(
            w is None or rows.starts[i] <= max(0, n_tokens - w + 1)
            for w, rows in self._rows.items()
        )

    def place(self, line: SequenceCache, n_tokens: int) -> None:
        i = self.row_of(line)
        for rows in self._rows.values():
            rows.offsets[i] = n_tokens

    def make_room(self, n: int) -> None:
        """Room for `n` more tokens in every row; windows that are full lose what nobody sees any
        more."""
        for window, rows in self._rows.items():
            leaves = [x for x in self.leaves if isinstance(x, BatchAttention) and x.rows is rows]
            if not leaves or max(rows.used()) + n <= min(leaf.slots for leaf in leaves):
                continue
            if window is not None:
                drops = [max(0, used - (window - 1 + self.layout.slack)) for used in rows.used()]
                if any(drops):
                    for leaf in leaves:
                        leaf.shift(drops)
                    rows.starts = [s + d for s, d in zip(rows.starts, drops, strict=True)]
            for leaf in leaves:
                leaf.make_room(n)

    def advance(self, counts: Sequence[int]) -> None:
        """After a call of the model: row i now ends `counts[i]` tokens further on."""
        for rows in self._rows.values():
            rows.offsets = [o + n for o, n in zip(rows.offsets, counts, strict=True)]
        for leaf in self.leaves:
            if isinstance(leaf, BatchAttention):
                leaf.written = 0
