"""Keys and values of one layer, for the rows of a batch (`Attention`); a line alone is one row.

It satisfies mlx-lm's cache protocol (update_and_fetch, offset, make_mask, keys, values;
mlx_lm/models/cache.py) and differs from its own classes in three ways that the contract needs.
Positions are host integers apart from the buffers, so taking tokens back is a subtraction: what
stands behind a row's end is never seen and is overwritten. Rows begin at the buffer's left edge and
may end anywhere, so each row can grow and shrink by itself. A sliding window is a plain buffer
whose front is cut off now and then, instead of a ring, so the last tokens can be taken back there
too.

Every buffer ("plane") is [rows, heads, slots, width]; plain memory has two planes, quantised memory
six.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import mlx.core as mx

# Slots are added in blocks of this many, as mlx-lm does: growing copies the buffer.
BLOCK_TOKENS = 256
_PHASES = 4


def rounded(slots: int, phase: int = 0) -> int:
    """`slots` rounded up to whole blocks and `phase` slots."""
    return -(-(slots - phase) // BLOCK_TOKENS) * BLOCK_TOKENS + phase


def phase_of(layer: int) -> int:
    """Slots by which `layer`'s buffers end behind a whole block. Growing copies a buffer: if all
    layers grew in the same step, that step would be a stall, so consecutive layers grow a quarter
    of a block apart."""
    return layer % _PHASES * (BLOCK_TOKENS // _PHASES)


class KvFormat:
    """How keys and values are stored: as the model computes them, or quantised in groups (`bits` 4
    or 8)."""

    def __init__(self, bits: int = 0, group_size: int = 64) -> None:
        self.bits = bits
        self.group_size = group_size

    def planes(self, keys: Any, values: Any) -> tuple[Any, ...]:
        if not self.bits:
            return keys, values
        of_keys = mx.quantize(keys, group_size=self.group_size, bits=self.bits)
        of_values = mx.quantize(values, group_size=self.group_size, bits=self.bits)
        return (*of_keys, *of_values)


class RowOffsets:
    """Where each row of a batch stands, shared by all layers of one window: counted once per step,
    not per layer."""

    def __init__(self, window: int | None, offsets: list[int]) -> None:
        # The offsets are those of the batch, whatever the window.
        self.window = window
        self.offsets = offsets
        self.starts = [0] * len(offsets)
        # New tokens see each other, not only those before them.
        self.sees_ahead = False
        self._step: tuple[tuple[int, ...], dict[Any, Any]] = ((), {})

    def used(self) -> list[int]:
        return [o - s for o, s in zip(self.offsets, self.starts, strict=True)]

    def holds(self, row: int, n_tokens: int) -> bool:
        """Can position `n_tokens` of that row be computed next: is everything its attention sees
        still here?"""
        return self.window is None or self.starts[row] <= max(0, n_tokens - self.window + 1)

    def _once(self, name: str, make: Callable[..., Any], *arguments: Any) -> Any:
        """What `make` makes of `arguments`, for all layers of a step."""
        at = (*self.offsets, *self.starts, self.sees_ahead)
        if self._step[0] != at:
            self._step = (at, {})
        memo = self._step[1]
        key = (name, *arguments)
        if key not in memo:
            memo[key] = make(*arguments)
        return memo[key]

    def offset(self, ahead: int = 0) -> Any:
        """Absolute positions of the next tokens, `ahead` tokens further on: int32 [rows], an int
        for one row."""
        if len(self.offsets) == 1:
            return self.offsets[0] + ahead
        return self._once("offset", self._offset, ahead)

    def _offset(self, ahead: int) -> Any:
        return mx.array([o + ahead for o in self.offsets], dtype=mx.int32)

    def index(self, n: int) -> Any:
        """Slots the next `n` tokens of every row go to, int32 [rows, 1, n, 1]; an int when it is
        the same slot."""
        used = self.used()
        if len(set(used)) == 1:
            return used[0]
        return self._once("index", self._index, n)

    def _index(self, n: int) -> Any:
        first = mx.array(self.used())[:, None, None, None]
        return first + mx.arange(n)[None, None, :, None]

    def span(self, n: int) -> tuple[int, int]:
        """The slots [first, last) that any of the next `n` tokens of any row may attend to."""
        used = self.used()
        first = 0
        if self.window is not None:
            first = max(0, min(used) + 1 - self.window)
        return first, max(used) + n

    def mask(self, n: int, window: int | None, return_array: bool) -> Any:
        """The mask for `n` new tokens in every row: None, "causal", or a boolean array
        [rows, 1, n, seen]."""
        return self._once("mask", self._mask, n, window or self.window, return_array)

    def _mask(self, n: int, window: int | None, return_array: bool) -> Any:
        used = self.used()
        first, last = self.span(n)
        if window is not None and last - first <= window:
            window = None
        if window is None and len(set(used)) == 1:
            if n == 1 or (self.sees_ahead and not return_array):
                return None
            if not return_array:
                return "causal"
        queries = self._index(n)
        slots = mx.arange(first, last)[None, None, None]
        mask = (slots <= queries) | self.sees_ahead
        if window is None:
            return mask
        return mask & (slots > queries - window)


class Attention:
    """Keys and values of one layer, for the rows of a batch. Row positions are in `rows`; the
    batch moves them after each call. `bits` and `group_size` exist only on quantised memory: mlx-lm
    asks for them with hasattr (mlx_lm/models/base.py, scaled_dot_product_attention)."""

    def __init__(self, form: KvFormat, rows: RowOffsets, phase: int = 0) -> None:
        self.form = form
        self.rows = rows
        # The layers of one window are cut at the same slot.
        self.phase = phase if rows.window is None else 0
        self.written = 0
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

    def _halves(self, planes: Sequence[Any]) -> tuple[Any, Any]:
        """Planes as the (keys, values) that attention takes."""
        if self.form.bits:
            return tuple(planes[:3]), tuple(planes[3:])
        return planes[0], planes[1]

    def _half(self, which: int) -> Any:
        if self.planes is None:
            return None
        return self._halves(self.planes)[which]

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
        """The mask for `n` new tokens in every row."""
        return self.rows.mask(n, window_size, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append to every row, which has room; returns the slots any row may attend to (the mask
        says which)."""
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
        """What the last written tokens attend to (models that share one layer's memory read it
        so)."""
        first, last = self.rows.span(self.written)
        return self._halves([p[..., first:last, :] for p in self.planes])

    def write(self, pieces: Sequence[Any], slot: int) -> None:
        """Let `pieces` stand from that slot on. They are copied into the buffers when those are
        asked for: a prefix of many blocks is then copied once."""
        if self._tail and slot != self._tail_end:
            self._join(0)
        self._tail.append(list(pieces))
        self._tail_end = slot + int(pieces[0].shape[2])

    def _join(self, n: int) -> None:
        """Copy what `write` was given into buffers, all in one go, and leave room for `n` more
        tokens."""
        tail = self._tail
        self._tail = []
        # Not where the line ends: it may have been cut since.
        end = self._tail_end
        before = end - sum(int(pieces[0].shape[2]) for pieces in tail)
        self._rebuild(before, tail, rounded(end + n, self.phase))

    def _rebuild(self, n_kept: int, tail: Sequence[Sequence[Any]], slots: int) -> None:
        """Buffers of so many slots: the first `n_kept` of those that are, then `tail`."""
        rebuilt = []
        for i, like in enumerate(tail[0] if tail else self._planes or ()):
            rows, heads, _, width = like.shape
            held = [pieces[i] for pieces in tail]
            if self._planes and n_kept:
                held.insert(0, self._planes[i][..., :n_kept, :])
            n_free = slots - sum(int(piece.shape[2]) for piece in held)
            room = mx.zeros((rows, heads, n_free, width), dtype=like.dtype)
            rebuilt.append(mx.concatenate([*held, room], axis=2))
        self._planes = rebuilt

    def make_room(self, used: int, n: int) -> None:
        """Room for `n` more tokens in every row, behind the `used` slots of the longest."""
        if self._tail:
            self._join(n)
        if self.planes is not None and used + n > self.slots:
            self._rebuild(min(used, self.slots), (), rounded(used + n, self.phase))

    def drop_front(self, drops: Sequence[int]) -> None:
        """Cut `drops[i]` slots off the front of row i."""
        kept = []
        for i, drop in enumerate(drops):
            kept.append([plane[:, :, drop:] for plane in self.row(i)])
        self.fill(kept)

    def row(self, i: int) -> list[Any]:
        """The slots in use of row `i`, as views."""
        used = self.rows.used()[i]
        return [p[i : i + 1, :, :used, :] for p in self.planes]

    def share(self, other: Attention) -> None:
        """Have `other`'s buffers. MLX arrays never change: the first to write gets its own copy."""
        if other.planes is None:
            self.planes = None
            return
        # `[...]` makes a second handle; assigning into one handle leaves the other with the old
        # contents.
        self.planes = [plane[...] for plane in other.planes]

    def fill(self, rows: Sequence[Sequence[Any]]) -> None:
        """Become the batch of `rows` (each a list of planes [1, heads, used, width]), with room for
        a token more."""
        longest = max(int(pieces[0].shape[2]) for pieces in rows)
        slots = rounded(longest + 1, self.phase)
        stacked = []
        for pieces in zip(*rows, strict=True):
            _, heads, _, width = pieces[0].shape
            # Written in place: padding each row and then joining them would copy everything once
            # more.
            plane = mx.zeros((len(pieces), heads, slots, width), dtype=pieces[0].dtype)
            for i, piece in enumerate(pieces):
                plane[i : i + 1, :, : int(piece.shape[2]), :] = piece
            stacked.append(plane)
        self.planes = stacked
