"""Keys and values of one layer, for the rows of a batch (`Attention`). A single sequence is one
row.

It implements mlx-lm's cache protocol (update_and_fetch, offset, make_mask, keys, values;
mlx_lm/models/cache.py). The contract requires three differences from mlx-lm's classes:

* Positions are integers on the host, apart from the buffers. So taking tokens back is a
  subtraction. Slots after a row's end are never attended to and are overwritten.
* Rows start at the buffer's left edge and may end anywhere, so each row can grow and shrink by
  itself.
* A sliding window is a plain buffer whose front is cut off now and then, instead of a ring. So its
  last tokens can be taken back too.

Each buffer ("plane") is [rows, heads, slots, width]. Plain memory has two planes, quantised memory
six.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx

from localllm_backends.mlx.kv_format import KvFormat
from localllm_backends.mlx.shared_prefix import Group, gathered

# Buffers grow in blocks of this many slots, as in mlx-lm: growing copies the buffer.
BLOCK_TOKENS = 256
_PHASES = 4


def rounded(slots: int, phase: int = 0) -> int:
    """Round `slots` up to a multiple of a block, plus `phase` slots."""
    return -(-(slots - phase) // BLOCK_TOKENS) * BLOCK_TOKENS + phase


def phase_of(layer: int) -> int:
    """Return by how many slots the ends of `layer`'s buffers are shifted from a block boundary.

    Growing copies a buffer. If all layers grew in the same step, that step would stall, so
    consecutive layers grow a quarter of a block apart.
    """
    return layer % _PHASES * (BLOCK_TOKENS // _PHASES)


class RowOffsets:
    """Positions of the rows of a batch, shared by all layers with the same window.

    They are computed once per step instead of once per layer.
    """

    def __init__(self, window: int | None, offsets: list[int]) -> None:
        # The offsets are the batch's own list; all windows share it.
        self.window = window
        self.offsets = offsets
        self.starts = [0] * len(offsets)
        # For each row the tokens in segments, before `starts`; empty if no row has any.
        self.shared: list[int] = []
        # If True, new tokens also attend to later new tokens.
        self.attends_ahead = False
        self._step: tuple[tuple[int, ...], dict[Any, Any]] = ((), {})

    def used(self) -> list[int]:
        return [o - s for o, s in zip(self.offsets, self.starts, strict=True)]

    def holds(self, row: int, n_tokens: int) -> bool:
        """Return whether position `n_tokens` of that row can be computed next.

        All tokens that it attends to must still be in memory.
        """
        return self.window is None or self.starts[row] <= max(0, n_tokens - self.window + 1)

    def _once(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """Cache the result of `make(*arguments)` for all layers of a step."""
        at = (*self.offsets, *self.starts, *self.shared, self.attends_ahead)
        if self._step[0] != at:
            self._step = (at, {})
        memo = self._step[1]
        key = (name, *arguments)
        if key not in memo:
            memo[key] = make(*arguments)
        return memo[key]

    def offset(self, ahead: int = 0) -> Any:
        """Return the absolute positions of the next tokens, plus `ahead`: int32 [rows], or an int
        for one row."""
        if len(self.offsets) == 1:
            return self.offsets[0] + ahead
        return self._once("offset", self._offset, ahead)

    def _offset(self, ahead: int) -> Any:
        return mx.array([o + ahead for o in self.offsets], dtype=mx.int32)

    def index(self, n: int) -> Any:
        """Return the slots for the next `n` tokens of every row, int32 [rows, 1, n, 1].

        Returns an int if all rows start at the same slot.
        """
        used = self.used()
        if len(set(used)) == 1:
            return used[0]
        return self._once("index", self._index, n)

    def _index(self, n: int) -> Any:
        first = mx.array(self.used())[:, None, None, None]
        return first + mx.arange(n)[None, None, :, None]

    def span(self, n: int) -> tuple[int, int]:
        """Return the slots [first, last) to which any of the next `n` tokens of any row may
        attend."""
        used = self.used()
        first = 0
        if self.window is not None:
            first = max(0, min(used) + 1 - self.window)
        return first, max(used) + n

    def mask(self, n: int, window: int | None, return_array: bool) -> Any:
        """Return the mask for `n` new tokens in every row.

        It is None, "causal", or a boolean array [rows, 1, n, seen].
        """
        return self._once("mask", self._mask, n, window or self.window, return_array)

    def _mask(self, n: int, window: int | None, return_array: bool) -> Any:
        first, last = self.span(n)
        n_shared = max(self.shared, default=0)
        if window is not None and n_shared + last - first <= window:
            window = None
        if window is None and len(set(self.offsets)) == len(set(self.starts)) == 1:
            if n == 1 or (self.attends_ahead and not return_array):
                return None
            if not return_array:
                return "causal"
        queries = self._index(n)
        slots = mx.arange(first, last)[None, None, None]
        mask = (slots <= queries) | self.attends_ahead
        if window is not None:
            mask = mask & (slots > queries - window)
        if not n_shared:
            return mask
        in_segments = mx.array(self.shared)[:, None, None, None]
        places = mx.arange(n_shared)[None, None, None]
        seen = mx.broadcast_to(places < in_segments, (len(self.shared), 1, n, n_shared))
        if window is not None:
            seen = seen & (places > queries + in_segments - window)
        return mx.concatenate([seen, mask], axis=3)

    def own_mask(self, n: int) -> Any:
        """Return the mask over each row's own slots, without those of segments; None: all."""
        return self._once("own mask", self._own_mask, n)

    def _own_mask(self, n: int) -> Any:
        first, last = self.span(n)
        if n == 1 and len(set(self.used())) == 1:
            return None
        slots = mx.arange(first, last)[None, None, None]
        return (slots <= self._index(n)) | self.attends_ahead

    def made(self, mask: Any) -> bool:
        """Return whether `mask` is of this step, and hides no token of a segment."""
        if mask is None or isinstance(mask, str):
            return True
        for (name, *arguments), result in self._step[1].items():
            if name == "mask" and result is mask:
                return arguments[1] is None
        return False


class Attention:
    """Keys and values of one layer, for the rows of a batch.

    `rows` has the positions; the batch advances them after each call. `bits` and `group_size` exist
    only for quantised memory, because mlx-lm checks for them with hasattr (mlx_lm/models/base.py,
    scaled_dot_product_attention).
    """

    def __init__(self, form: KvFormat, rows: RowOffsets, phase: int = 0) -> None:
        self.form = form
        self.rows = rows
        # All layers with the same window are cut at the same slot.
        self.phase = phase if rows.window is None else 0
        self.written = 0
        # The segments of the rows, and the number of this leaf in them.
        self.groups: list[Group] = []
        self.number = 0
        # Whether attention was computed from what is stored, and what it was fetched as.
        self.was_split = False
        self._fetched: tuple[Any, Any, list[Any]] | None = None
        self.planes = None
        if form.bits:
            self.bits = form.bits
            self.group_size = form.group_size

    @property
    def offset(self) -> Any:
        """Position of each row's next token, int32 [rows]; an int for one row."""
        return self.rows.offset(self.written)

    @property
    def planes(self) -> Any:
        if self._tail:
            self._join(1)
        return self._planes

    @planes.setter
    def planes(self, planes: list[Any] | None) -> None:
        self._planes = planes
        self._tail: list[list[Any]] = []
        self._tail_end = 0

    @property
    def slots(self) -> int:
        if self.planes is None:
            return 0
        return int(self.planes[0].shape[2])

    @property
    def nbytes(self) -> int:
        return sum(int(p.nbytes) for p in chain(self._planes or (), *self._tail))

    def _half(self, which: int) -> Any:
        if self.planes is None:
            return None
        return self.form.halves(self.planes)[which]

    def _set_half(self, which: int, value: Any) -> None:
        n = len(self.planes) // 2
        begin = n * which
        self.planes[begin : begin + n] = value if self.form.bits else [value]

    @property
    def keys(self) -> Any:
        return self._half(0)

    @keys.setter
    def keys(self, value: Any) -> None:
        self._set_half(0, value)

    @property
    def values(self) -> Any:
        return self._half(1)

    @values.setter
    def values(self, value: Any) -> None:
        self._set_half(1, value)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """Return the mask for `n` new tokens in every row."""
        return self.rows.mask(n, window_size, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append to every row, and return the slots to which any row may attend.

        The rows must have room. The mask selects each row's slots.
        """
        new = self.form.planes(keys, values)
        n = int(keys.shape[2])
        index = self.rows.index(n)
        if self.planes is None:
            self.write(new, 0)
            self._join(0)
        elif isinstance(index, int):
            for plane, piece in zip(self.planes, new, strict=True):
                plane[..., index : index + n, :] = piece
        else:
            written = []
            for plane, piece in zip(self.planes, new, strict=True):
                written.append(mx.put_along_axis(plane, index, piece, axis=2))
            self.planes = written
        self.written = n
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the newest tokens attend to. Models whose layers share memory call this."""
        first, last = self.rows.span(self.written)
        own = [p[..., first:last, :] for p in self.planes]
        if not self.groups and not self.form.is_decoded:
            return self.form.halves(own)
        whole = own
        if self.groups:
            whole = gathered(self.groups, self.number, own)
        keys, values = self.form.fetched(whole)
        self._fetched = keys, values, own
        return keys, values

    def take_own(self, keys: Any, values: Any, mask: Any, n: int) -> tuple[list[Any], Any] | None:
        """Return the planes of the rows' own tokens, and their mask for `n` new tokens.

        Returns None unless `keys` and `values` were just fetched from segments or decoded, and the
        tokens in segments are not masked.
        """
        fetched = self._fetched
        self._fetched = None
        if fetched is None or keys is not fetched[0] or values is not fetched[1]:
            return None
        if not self.rows.made(mask):
            return None
        self.was_split = True
        return fetched[2], self.rows.own_mask(n)

    def forget_step(self) -> None:
        """Forget the newest call, after the step that made it."""
        self.written = 0
        self._fetched = None

    def write(self, pieces: Sequence[Any], slot: int) -> None:
        """Put `pieces` into the buffers from that slot on.

        They are copied when the buffers are next used, so that a prefix of many blocks is copied
        only once.
        """
        if self._tail and slot != self._tail_end:
            self._join(0)
        self._tail.append(list(pieces))
        self._tail_end = slot + int(pieces[0].shape[2])

    def _join(self, n: int) -> None:
        """Copy the pieces from `write` into the buffers at once, and leave room for `n` more
        tokens."""
        tail = self._tail
        self._tail = []
        # Not the end of the sequence, which may have been truncated since.
        end = self._tail_end
        before = end - sum(int(pieces[0].shape[2]) for pieces in tail)
        self._rebuild(before, tail, rounded(end + n, self.phase))

    def _rebuild(self, n_kept: int, tail: Sequence[Sequence[Any]], slots: int) -> None:
        """Rebuild the buffers with `slots` slots: the first `n_kept` present slots, then `tail`."""
        rebuilt = []
        for i, like in enumerate(tail[0] if tail else self._planes or ()):
            rows, heads, _, width = like.shape
            row_pieces = [pieces[i] for pieces in tail]
            if self._planes and n_kept:
                row_pieces.insert(0, self._planes[i][..., :n_kept, :])
            n_free = slots - sum(int(piece.shape[2]) for piece in row_pieces)
            room = mx.zeros((rows, heads, n_free, width), dtype=like.dtype)
            rebuilt.append(mx.concatenate([*row_pieces, room], axis=2))
        self._planes = rebuilt

    def make_room(self, used: int, n: int) -> None:
        """Make room for `n` more tokens in every row, after the `used` slots of the longest."""
        if self._tail:
            self._join(n)
        if self.planes is not None and used + n > self.slots:
            self._rebuild(min(used, self.slots), (), rounded(used + n, self.phase))

    def drop_front(self, drops: Sequence[int]) -> None:
        """Cut `drops[i]` slots off the front of row i."""
        remaining = []
        for i, drop in enumerate(drops):
            remaining.append([plane[:, :, drop:] for plane in self.row(i)])
        self.fill(remaining)

    def row(self, i: int) -> list[Any]:
        """Return the used slots of row `i`, as views."""
        if self.planes is None and self.groups:
            shared = self.groups[0].chain[-1].of_leaf(self.number)
            return [plane[:, :, :0] for plane in shared]
        used = self.rows.used()[i]
        return [p[i : i + 1, :, :used, :] for p in self.planes]

    def share(self, other: Attention) -> None:
        """Share `other`'s buffers. MLX arrays are immutable, so the first one to write gets its own
        copy."""
        if other.planes is None:
            self.planes = None
            return
        # `[...]` makes a second handle. An assignment into one handle does not change the other.
        self.planes = [plane[...] for plane in other.planes]

    def fill(self, rows: Sequence[Sequence[Any]]) -> None:
        """Become a batch of `rows`, with room for one more token.

        Each row is a list of planes [1, heads, used, width].
        """
        longest = max(int(pieces[0].shape[2]) for pieces in rows)
        slots = rounded(longest + 1, self.phase)
        stacked = []
        for pieces in zip(*rows, strict=True):
            _, heads, _, width = pieces[0].shape
            # Write rows in place: padding each row and then joining them would copy everything
            # twice.
            plane = mx.zeros((len(pieces), heads, slots, width), dtype=pieces[0].dtype)
            for i, piece in enumerate(pieces):
                plane[i : i + 1, :, : int(piece.shape[2]), :] = piece
            stacked.append(plane)
        self.planes = stacked
