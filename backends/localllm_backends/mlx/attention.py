"""Keys and values of one layer, for one sequence (`LineAttention`) or for the rows of a batch
(`BatchAttention`).

Both satisfy mlx-lm's cache protocol (update_and_fetch, offset, make_mask, keys, values;
mlx_lm/models/cache.py) and differ from its own classes in three ways that the contract needs.
Positions are host integers apart from the buffers, so taking tokens back is a subtraction: what
stands behind a row's end is never seen and is overwritten. BatchOffsets begin at the buffer's left
edge and may end anywhere, so each row can grow and shrink by itself. A sliding window is a plain
buffer whose front is cut off now and then, instead of a ring, so the last tokens can be taken back
there too.

Every buffer ("plane") is [rows, heads, slots, width]; plain memory has two planes, quantised memory
six.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import mlx.core as mx

# Slots are added in blocks of this many, as mlx-lm does: growing copies the buffer.
BLOCK_TOKENS = 256
_PHASES = 4
_UNQUANTISED_PLANES = 2


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
        self.bits, self.group_size = bits, group_size

    def planes(self, keys: Any, values: Any) -> tuple[Any, ...]:
        if not self.bits:
            return keys, values
        return (
            *mx.quantize(keys, group_size=self.group_size, bits=self.bits),
            *mx.quantize(values, group_size=self.group_size, bits=self.bits),
        )


class _Attention:
    """What a model sees of either kind. `bits` and `group_size` exist only on quantised memory:
    mlx-lm asks for them with hasattr (mlx_lm/models/base.py, scaled_dot_product_attention)."""

    planes: list[Any] | None

    def __init__(self, form: KvFormat, window: int | None, phase: int) -> None:
        self.form, self.window = form, window
        # The layers of one window are cut at the same slot.
        self.phase = phase if window is None else 0
        self.planes = None
        if form.bits:
            self.bits, self.group_size = form.bits, form.group_size

    @property
    def slots(self) -> int:
        return 0 if self.planes is None else int(self.planes[0].shape[2])

    @property
    def nbytes(self) -> int:
        return 0 if self.planes is None else sum(int(p.nbytes) for p in self.planes)

    def _half(self, which: int) -> Any:
        if self.planes is None:
            return None
        if not self.form.bits:
            return self.planes[which]
        return tuple(self.planes[3 * which : 3 * which + 3])

    def _set_half(self, which: int, value: Any) -> None:
        assert self.planes is not None
        if self.form.bits:
            self.planes[3 * which : 3 * which + 3] = value
        else:
            self.planes[which] = value

    keys = property(lambda self: self._half(0), lambda self, value: self._set_half(0, value))
    values = property(lambda self: self._half(1), lambda self, value: self._set_half(1, value))

    def _seen(self, first: int, last: int) -> tuple[Any, Any]:
        """Slots [first, last) as the (keys, values) that attention takes."""
        assert self.planes is not None
        if first == 0 and last == self.slots:
            seen: Sequence[Any] = self.planes
        else:
            seen = [p[..., first:last, :] for p in self.planes]
        if len(seen) == _UNQUANTISED_PLANES:
            return seen[0], seen[1]
        return tuple(seen[:3]), tuple(seen[3:])

    def _grow(self, used: int, slots: int, like: Sequence[Any], drop: int = 0) -> None:
        """Make room for `slots`; the slots [drop, used) move to the front of the new buffers."""
        wider = rounded(slots, self.phase)
        grown = []
        for i, piece in enumerate(like):
            rows, heads, _, width = piece.shape
            held = (
                [] if self.planes is None or used == drop else [self.planes[i][..., drop:used, :]]
            )
            room = mx.zeros((rows, heads, wider - (used - drop), width), dtype=piece.dtype)
            grown.append(mx.concatenate([*held, room], axis=2) if held else room)
        self.planes = grown


class LineAttention(_Attention):
    """One sequence: the thin path, a slice written and a slice read per step, as mlx-lm's own
    KVCache does it."""

    def __init__(
        self, form: KvFormat, window: int | None = None, slack: int = 0, phase: int = 0
    ) -> None:
        super().__init__(form, window, phase)
        self.offset = 0
        self.start = 0
        # New tokens see each other, not only those before them.
        self.sees_ahead = False
        self._slack = slack

    @property
    def nbytes(self) -> int:
        return sum(int(p.nbytes) for p in chain(self._planes or (), *self._tail))

    @property
    def planes(self) -> list[Any] | None:
        if self._tail:
            self._join(1)
        return self._planes

    @planes.setter
    def planes(self, planes: list[Any] | None) -> None:
        self._planes = planes
        self._tail: list[list[Any]] = []
        self._tail_end = 0

    def _join(self, n: int) -> None:
        """Copy what `write` was given into the buffers, all in one go, and leave room for `n` more
        tokens."""
        tail, self._tail = self._tail, []
        # Not where the line ends: it may have been cut since.
        end = self._tail_end
        before = end - sum(int(pieces[0].shape[2]) for pieces in tail)
        if self._planes is not None and end + n <= self.slots:
            for pieces in tail:
                stop = before + int(pieces[0].shape[2])
                for plane, piece in zip(self._planes, pieces, strict=True):
                    plane[..., before:stop, :] = piece
                before = stop
            return
        slots = rounded(end + n, self.phase)
        joined = []
        for i, piece in enumerate(tail[0]):
            rows, heads, _, width = piece.shape
            held = [self._planes[i][..., :before, :]] if self._planes is not None and before else []
            room = mx.zeros((rows, heads, slots - end, width), dtype=piece.dtype)
            joined.append(mx.concatenate([*held, *(pieces[i] for pieces in tail), room], axis=2))
        self._planes = joined

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append; returns everything the new tokens may attend to."""
        new = self.form.planes(keys, values)
        n = int(keys.shape[2])
        if self._tail:
            self._join(n)
        used = self.offset - self.start
        if self.planes is None or used + n > self.slots:
            drop = 0 if self.window is None else max(0, used - (self.window - 1 + self._slack))
            self._grow(used, used - drop + n, new, drop)
            self.start += drop
            used -= drop
        assert self.planes is not None
        for plane, piece in zip(self.planes, new, strict=True):
            plane[..., used : used + n, :] = piece
        self.offset += n
        return self._seen(self._first(used + n, n), used + n)

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last token attends to (models that share one layer's memory read it so)."""
        used = self.offset - self.start
        return self._seen(self._first(used, 1), used)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for `n` new tokens: None, "causal", or a boolean array [n, seen]."""
        used = self.offset - self.start + n
        seen = used - self._first(used, n)
        window = window_size or self.window
        if window is not None and seen <= window:
            window = None
        if window is None and not (return_array and n > 1):
            return None if n == 1 or self.sees_ahead else "causal"
        queries = mx.arange(seen - n, seen)[:, None]
        slots = mx.arange(seen)[None]
        mask = (slots <= queries) | self.sees_ahead
        return mask if window is None else mask & (slots > queries - window)

    def _first(self, used: int, n: int) -> int:
        """The first slot any of the last `n` of `used` tokens attends to."""
        return 0 if self.window is None else max(0, used - (self.window + n - 1))

    def holds(self, n_tokens: int) -> bool:
        """Can position `n_tokens` be computed next: is everything its attention sees still here?"""
        return self.window is None or self.start <= max(0, n_tokens - self.window + 1)

    def fork(self) -> LineAttention:
        """Another line over the same buffers. MLX arrays never change: the first to write gets its
        own copy."""
        other = LineAttention(self.form, self.window, self._slack, self.phase)
        other.offset, other.start = self.offset, self.start
        # `[...]` makes a second handle; assigning into one handle leaves the other with the old
        # contents.
        other.planes = None if self.planes is None else [p[...] for p in self.planes]
        return other

    def read_used(self) -> list[Any]:
        """The slots in use of every plane, as views."""
        assert self.planes is not None
        return [p[..., : self.offset - self.start, :] for p in self.planes]

    def write(self, pieces: Sequence[Any], position: int) -> None:
        """Append `pieces`, whose first token stands at absolute `position`; an empty line may start
        anywhere. They are copied into the buffers when those are asked for: a prefix of many blocks
        is then copied once."""
        if self.offset == 0:
            self.start, self.offset, self.planes = position, position, None
        used = self.offset - self.start
        if self._tail and used != self._tail_end:
            self._join(0)
        self._tail.append(list(pieces))
        self._tail_end = used + int(pieces[0].shape[2])
        self.offset += int(pieces[0].shape[2])


class BatchOffsets:
    """Where each row of a batch stands, shared by all layers of one window: counted once per step,
    not per layer."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.offsets: list[int] = []
        self.starts: list[int] = []
        self._step: tuple[tuple[int, ...], dict[Any, Any]] = ((), {})

    def used(self) -> list[int]:
        return [o - s for o, s in zip(self.offsets, self.starts, strict=True)]

    def _memo(self) -> dict[Any, Any]:
        key = (*self.offsets, *self.starts)
        if self._step[0] != key:
            self._step = (key, {})
        return self._step[1]

    def offset(self, ahead: int = 0) -> Any:
        """Absolute positions of the next tokens, int32 [rows]; `ahead` tokens further on."""
        memo = self._memo()
        if ("offset", ahead) not in memo:
            memo["offset", ahead] = mx.array([o + ahead for o in self.offsets], dtype=mx.int32)
        return memo["offset", ahead]

    def index(self, n: int) -> Any:
        """Slots the next `n` tokens of every row go to, int32 [rows, 1, n, 1]; an int when it is
        the same slot."""
        memo = self._memo()
        if ("index", n) not in memo:
            used = self.used()
            if len(set(used)) == 1:
                memo["index", n] = used[0]
            else:
                slots = mx.array(used, dtype=mx.int32)[:, None] + mx.arange(n, dtype=mx.int32)
                memo["index", n] = slots[:, None, :, None]
        return memo["index", n]

    def span(self, n: int) -> tuple[int, int]:
        """The slots [first, last) that any of the next `n` tokens of any row may attend to."""
        used = self.used()
        first = 0 if self.window is None else max(0, min(used) + 1 - self.window)
        return first, max(used) + n

    def mask(self, n: int, window: int | None, return_array: bool) -> Any:
        """Boolean mask [rows, 1, n, seen]; None where every row sees everything."""
        memo = self._memo()
        key = ("mask", n, window, return_array)
        if key not in memo:
            memo[key] = self._mask(n, window or self.window, return_array)
        return memo[key]

    def _mask(self, n: int, window: int | None, return_array: bool) -> Any:
        used = self.used()
        first, last = self.span(n)
        if window is not None and last - first <= window:
            window = None
        if n == 1 and len(set(used)) == 1 and window is None and not return_array:
            return None
        queries = (
            mx.array(used, dtype=mx.int32)[:, None, None, None] + mx.arange(n)[None, None, :, None]
        )
        slots = mx.arange(first, last)[None, None, None]
        mask = slots <= queries
        return mask if window is None else mask & (slots > queries - window)


class BatchAttention(_Attention):
    """The rows of a batch in one set of buffers. Row positions are in `rows`; the batch moves them
    after each call."""

    def __init__(self, form: KvFormat, rows: BatchOffsets, phase: int = 0) -> None:
        super().__init__(form, rows.window, phase)
        self.rows = rows
        self.written = 0

    @property
    def offset(self) -> Any:
        """Position of each row's next token, int32 [rows]."""
        return self.rows.offset(self.written)

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask for `n` new tokens in every row."""
        return self.rows.mask(n, window_size, return_array)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append to every row; returns the slots any row may attend to (the mask says which)."""
        assert self.planes is not None
        n = int(keys.shape[2])
        index = self.rows.index(n)
        for i, piece in enumerate(self.form.planes(keys, values)):
            if isinstance(index, int):
                self.planes[i][..., index : index + n, :] = piece
            else:
                self.planes[i] = mx.put_along_axis(self.planes[i], index, piece, axis=2)
        self.written = n
        return self._seen(*self.rows.span(n))

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the last written tokens attend to."""
        return self._seen(*self.rows.span(self.written))

    def make_room(self, n: int) -> None:
        """Room for `n` more tokens in every row."""
        used = max(self.rows.used())
        if self.planes is not None and used + n > self.slots:
            self._grow(min(used, self.slots), used + n, self.planes)

    def shift(self, drops: Sequence[int]) -> None:
        """Cut `drops[i]` slots off the front of row i."""
        assert self.planes is not None
        slots = self.slots
        index = mx.minimum(mx.arange(slots)[None, :] + mx.array(list(drops))[:, None], slots - 1)[
            :, None, :, None
        ]
        self.planes = [mx.take_along_axis(p, index, axis=2) for p in self.planes]

    def row(self, i: int) -> list[Any]:
        """The slots in use of row `i`, as views."""
        assert self.planes is not None
        used = self.rows.used()[i]
        return [p[i : i + 1, :, :used, :] for p in self.planes]

    def fill(self, rows: Sequence[Sequence[Any]], slots: int) -> None:
        """Become the batch of `rows` (each a list of planes [1, heads, used, width])."""
        slots = rounded(slots, self.phase)
        stacked = []
        for pieces in zip(*rows, strict=True):
            _, heads, _, width = pieces[0].shape
            # Written in place: padding each row and then joining them would copy everything once
            # more.
            whole = mx.zeros((len(pieces), heads, slots, width), dtype=pieces[0].dtype)
            for i, piece in enumerate(pieces):
                whole[i : i + 1, :, : int(piece.shape[2]), :] = piece
            stacked.append(whole)
        self.planes = stacked
