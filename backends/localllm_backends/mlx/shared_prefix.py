"""Tokens that several sequences share (`Segment`), and attention over them without a copy.

A fork does not copy its prefix. The buffers of the prefix become a Segment, which is not written
again. Each sequence keeps its chain of segments, and buffers of its own for newer tokens.

The kernels need contiguous keys, and a gather would copy the prefix in each step. So a decode step
computes attention in parts: the scores of a segment once for all rows that share it, the scores of
each row's own tokens, and one softmax over both (as in Hydragen, arXiv:2402.05099). The result is
the same, and the prefix is read once instead of once per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import mlx.core as mx

from localllm_backends.mlx.kv_format import KvFormat

# A SequenceCache. Its module imports this one.
Holder: TypeAlias = Any
# Up to this many tokens are copied for a fork: one block. Smaller segments would cost more in each
# step than they save.
COPIED_TOKENS = 256
# A chain of this many segments gets no further one merely to keep a batch small.
LONG_CHAIN = 4
# Buffers with this many unused slots are replaced by smaller ones.
WASTED_TOKENS = 512


class Segment:
    """Keys and values of consecutive tokens, by the number of the layer's leaf.

    `uncounted`: tokens of it that were copied for a fork, and take no cells.
    """

    def __init__(self, planes: dict[int, list[Any]], uncounted: int) -> None:
        self.planes = planes
        self.uncounted = uncounted
        self._holders: WeakSet[Holder] = WeakSet()

    def add_holder(self, sequence: Holder) -> None:
        self._holders.add(sequence)

    @property
    def is_shared(self) -> bool:
        """True if more than one sequence uses it."""
        return len(self._uses()) > 1

    def _uses(self) -> list[int]:
        """Return for each sequence that uses it the number of its tokens."""
        uses: list[int] = []
        for holder in self._holders:
            uses += [part.n_tokens for part in holder.chain if part.segment is self]
        return uses

    @property
    def nbytes(self) -> int:
        n_bytes = 0
        for planes in self.planes.values():
            n_bytes += sum(int(plane.nbytes) for plane in planes)
        return n_bytes

    def shrink(self) -> None:
        """Free the memory of tokens that no sequence uses any more, if it is large."""
        used = max(self._uses(), default=0)
        if not used:
            self.planes = {}
            return
        slots = max(int(planes[0].shape[2]) for planes in self.planes.values())
        if slots - used <= WASTED_TOKENS:
            return
        for leaf, planes in self.planes.items():
            self.planes[leaf] = [mx.contiguous(plane[:, :, :used]) for plane in planes]
            mx.eval(self.planes[leaf])


class SegmentPart(NamedTuple):
    """The first `n_tokens` of a segment."""

    segment: Segment
    n_tokens: int

    def of_leaf(self, leaf: int) -> list[Any]:
        """Return the part's planes [1, heads, n_tokens, width] of that leaf, as views."""
        return [plane[:, :, : self.n_tokens] for plane in self.segment.planes[leaf]]


Chain = tuple[SegmentPart, ...]


class Group(NamedTuple):
    """Rows [begin, stop) of a batch, which have the same chain."""

    begin: int
    stop: int
    chain: Chain


def chain_tokens(chain: Chain) -> int:
    return sum(part.n_tokens for part in chain)


def cut_chain(chain: Chain, n_tokens: int) -> Chain:
    """Return the chain of the first `n_tokens`."""
    parts: list[SegmentPart] = []
    for part in chain:
        n = min(part.n_tokens, n_tokens)
        if n > 0:
            parts.append(SegmentPart(part.segment, n))
        n_tokens -= n
    return tuple(parts)


def chain_order(seq: Holder) -> list[tuple[int, int]]:
    """Return a key that puts sequences with the same chain next to each other."""
    return [(id(part.segment), part.n_tokens) for part in seq.chain]


def uses_shared(seq: Holder) -> bool:
    """Return whether another sequence uses one of its segments."""
    return any(part.segment.is_shared for part in seq.chain)


def positions_of(chain: Chain, leaf: int, start: int, stop: int) -> list[list[Any]]:
    """Return the planes of positions [start, stop) in each segment, as views."""
    found = []
    at = 0
    for part in chain:
        begin = max(0, start - at)
        end = min(part.n_tokens, stop - at)
        if begin < end:
            found.append([plane[:, :, begin:end] for plane in part.of_leaf(leaf)])
        at += part.n_tokens
    return found


def end_to_end(pieces: Sequence[list[Any]]) -> list[Any]:
    """Return each plane of consecutive `pieces` as one array."""
    if len(pieces) == 1:
        return pieces[0]
    return [mx.concatenate(list(planes), axis=2) for planes in zip(*pieces, strict=True)]


def grouped(chains: Sequence[Chain]) -> list[Group]:
    """Return groups of consecutive rows with the same chain; empty if no row has a chain."""
    groups: list[Group] = []
    if not any(chains):
        return groups
    for row, chain in enumerate(chains):
        if groups and groups[-1].chain == chain:
            groups[-1] = groups[-1]._replace(stop=row + 1)
        else:
            groups.append(Group(row, row + 1, chain))
    return groups


def cells_used(sequences: Iterable[Holder]) -> int:
    """Return the cells of these sequences. Tokens of a segment count once."""
    n_cells = 0
    longest: dict[Segment, int] = {}
    for seq in sequences:
        n_cells += seq.length - chain_tokens(seq.chain) - seq.uncounted
        for part in seq.chain:
            longest[part.segment] = max(longest.get(part.segment, 0), part.n_tokens)
    for segment, n_tokens in longest.items():
        n_cells += max(0, n_tokens - segment.uncounted)
    return n_cells


def segment_bytes(sequences: Iterable[Holder]) -> int:
    """Return the bytes of all segments of these sequences."""
    segments: set[Segment] = set()
    for seq in sequences:
        segments.update(part.segment for part in seq.chain)
    return sum(segment.nbytes for segment in segments)


def gathered(groups: Sequence[Group], leaf: int, own: Sequence[Any]) -> list[Any]:
    """Return planes [rows, heads, shared + slots, width]: each row's chain, padded to the longest,
    then its `own` slots.

    MLX computes them only if the model reads them.
    """
    longest = max(chain_tokens(group.chain) for group in groups)
    whole = []
    for i, plane in enumerate(own):
        rows = [_group_rows(group, leaf, i, plane, longest) for group in groups]
        whole.append(mx.concatenate(rows, axis=0))
    return whole


def _group_rows(group: Group, leaf: int, i: int, plane: Any, longest: int) -> Any:
    """Return plane number `i` of the rows of `group`, with segments padded to `longest` tokens."""
    _, heads, _, width = plane.shape
    pieces = [part.of_leaf(leaf)[i] for part in group.chain]
    n_missing = longest - chain_tokens(group.chain)
    if n_missing:
        pieces.append(mx.zeros((1, heads, n_missing, width), dtype=plane.dtype))
    repeated = []
    for piece in pieces:
        shape = (group.stop - group.begin, heads, int(piece.shape[2]), width)
        repeated.append(mx.broadcast_to(piece, shape))
    return mx.concatenate([*repeated, plane[group.begin : group.stop]], axis=2)


class OwnKeys(NamedTuple):
    """The tokens of a batch's rows that are not in segments.

    `planes`: [rows, heads, slots, width]. `mask`: the slots to attend to, boolean [rows, 1, n,
    slots]; None: all.
    """

    planes: list[Any]
    mask: Any


def attend(
    groups: Sequence[Group], leaf: int, form: KvFormat, own: OwnKeys, queries: Any
) -> Any:  # fmt: skip
    """Return the attention of `queries` [rows, heads, n, width], which are already scaled.

    `groups` are empty if no row has segments.
    """
    out = []
    for begin, stop, chain in groups or [Group(0, int(queries.shape[0]), ())]:
        mask = own.mask
        if mask is not None:
            mask = mask[begin:stop]
        rows = OwnKeys([plane[begin:stop] for plane in own.planes], mask)
        shared = [form.halves(part.of_leaf(leaf)) for part in chain]
        out.append(_attend_group(shared, form, rows, queries[begin:stop]))
    return mx.concatenate(out, axis=0).astype(queries.dtype)


def _attend_group(shared: Sequence[tuple[Any, Any]], form: KvFormat, own: OwnKeys, q: Any) -> Any:
    """Return the attention of rows that have the keys and values `shared` in common."""
    n_rows, n_heads, n, width = q.shape
    n_kv = int(own.planes[0].shape[1])
    per_kv = n_heads // n_kv * n
    # All rows, and all heads with the same keys, become queries of one matrix product.
    q = q.astype(mx.float32).reshape(n_rows, n_kv, per_kv, width)
    scores = [form.scores(_folded(q), keys) for keys, _ in shared]
    own_keys, own_values = form.halves(own.planes)
    of_own = form.scores(q, own_keys)
    if own.mask is not None:
        by_query = of_own.reshape(n_rows, n_kv, -1, n, of_own.shape[-1])
        of_own = mx.where(own.mask[:, :, None], by_query, -mx.inf).reshape(of_own.shape)
    scores.append(_folded(of_own))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    ends = list(accumulate(int(each.shape[-1]) for each in scores))
    *of_shared, of_rows = mx.split(weights, ends[:-1], axis=-1)
    total = form.weighted(_unfolded(of_rows, n_rows), own_values)
    for part, (_, values) in zip(of_shared, shared, strict=True):
        total = total + _unfolded(form.weighted(part, values), n_rows)
    return total.reshape(n_rows, n_heads, n, -1)


def _folded(rows: Any) -> Any:
    """Return [rows, heads, n, width] as [1, heads, rows * n, width]."""
    _, heads, _, width = rows.shape
    return rows.transpose(1, 0, 2, 3).reshape(1, heads, -1, width)


def _unfolded(folded: Any, n_rows: int) -> Any:
    """Undo `_folded`."""
    _, heads, _, width = folded.shape
    return folded.reshape(heads, n_rows, -1, width).transpose(1, 0, 2, 3)
