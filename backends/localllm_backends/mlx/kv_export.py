"""A sequence's memory as bytes, and back: KV of any of its tokens and, apart from that, the state
behind its last one; or, where there is nothing but state or several machines hold it, everything at
once.

The bytes are a header that says what they are, then the arrays one after another."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import mlx.core as mx
import numpy as np

from localllm_backends.contract import BackendFailure, CannotRewindError
from localllm_backends.mlx.attention import Attention
from localllm_backends.mlx.sequence_cache import Layout, SequenceCache, arrays_of
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.stepping import Stepper

_HEAD = struct.Struct("<4sI")
_MAGIC = b"LMX1"


@dataclass(frozen=True, slots=True)
class BlobPart:
    """One leaf of a sequence: its arrays, and the absolute position of their first token."""

    position: int
    arrays: list[Any]


@dataclass(frozen=True, slots=True)
class Blob:
    """Tokens [start, stop) of a sequence, and the images that end in them (SequenceCache)."""

    start: int
    stop: int
    parts: list[BlobPart]
    images: list[tuple[int, int]] = field(default_factory=list)

    def arrays(self) -> Iterator[Any]:
        """All of them, part by part."""
        return chain.from_iterable(part.arrays for part in self.parts)


def _pack(identity: str, blob: Blob) -> bytes:
    """The bytes of `blob`; `identity` names the model and how its memory is stored."""
    # NumPy has no bfloat16 and needs none: arrays travel as bytes.
    bodies: list[Any] = [mx.contiguous(a).view(mx.uint8) for a in blob.arrays()]
    mx.eval(bodies)
    header = _described(identity, blob)
    return b"".join([_HEAD.pack(_MAGIC, len(header)), header, *(memoryview(b) for b in bodies)])


def _packed_bytes(identity: str, blob: Blob) -> int:
    """How many bytes `pack` gives, without computing them."""
    return _HEAD.size + len(_described(identity, blob)) + sum(int(a.nbytes) for a in blob.arrays())


def _described(identity: str, blob: Blob) -> bytes:
    leaves = []
    for part in blob.parts:
        leaves.append([part.position, [[list(a.shape), _name(a)] for a in part.arrays]])
    span = {"of": identity, "start": blob.start, "stop": blob.stop, "images": blob.images}
    return json.dumps({**span, "leaves": leaves}).encode()


def _unpack(identity: str, data: bytes | memoryview) -> Blob:
    """The blob in `data`; BackendFailure where it is not one of `identity`, whole and of the sizes
    it says."""
    view = memoryview(data).cast("B")
    try:
        magic, size = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise ValueError("it is none of ours")
        at = _HEAD.size + size
        header = json.loads(bytes(view[_HEAD.size : at]))
        if header["of"] != identity:
            raise ValueError("it was written by another model or with another KV type")
        parts = []
        for position, described in header["leaves"]:
            arrays = []
            for shape, name in described:
                arrays.append(_array(view, at, shape, name))
                at += int(arrays[-1].nbytes)
            parts.append(BlobPart(int(position), arrays))
        if at != len(view):
            raise ValueError("it has another length than it says")
        images = [(int(stop), int(fewer)) for stop, fewer in header["images"]]
        return Blob(int(header["start"]), int(header["stop"]), parts, images)
    except (AttributeError, KeyError, TypeError, ValueError, struct.error) as e:
        raise BackendFailure(f"this is not an exported KV block, or a damaged one: {e}") from e


def _array(view: memoryview, at: int, shape: Sequence[int], name: str) -> Any:
    """That array, whose bytes begin at `at`."""
    dtype = getattr(mx, name, None)
    if not isinstance(dtype, mx.Dtype) or not shape or any(int(n) < 0 for n in shape):
        raise ValueError(f"unknown array {name} {shape}")
    in_bytes = [*shape[:-1], shape[-1] * dtype.size]
    # Fails where the block is cut short.
    body = np.frombuffer(view, np.uint8, math.prod(in_bytes), at)
    return mx.array(body.reshape(in_bytes)).view(dtype)


def _name(array: Any) -> str:
    return str(array.dtype).rpartition(".")[2]


def _same_arrays(one: Sequence[Any], other: Sequence[Any], *, axis: int | None) -> bool:
    """Equal types and shapes; the length along `axis` may differ."""

    def shape(a: Any) -> tuple[int, ...]:
        return tuple(0 if i == axis else int(n) for i, n in enumerate(a.shape))

    return len(one) == len(other) and all(
        a.dtype == b.dtype and shape(a) == shape(b) for a, b in zip(one, other, strict=True)
    )


@dataclass
class KvExport:
    """Reads and fills lines. `apart`: windows and recurrent state are exported apart from the KV
    that every token keeps."""

    identity: str
    layout: Layout
    shapes: Shapes
    stepper: Stepper
    apart: bool

    def __post_init__(self) -> None:
        leaves = range(len(self.shapes.leaves))
        self._kept = [i for i in leaves if self.shapes.slots[i] and self.shapes.windows[i] is None]
        self._state = [i for i in leaves if i not in self._kept]

    def export_range(self, line: SequenceCache, start: int, stop: int) -> bytes:
        """KV of tokens [start, stop) behind a header."""
        if line.replay or not (self.layout.plain or self.apart):
            self.stepper.undo_ahead_of(line)
            self.stepper.recompute(line)
        if self.layout.plain or self.apart:
            parts = [BlobPart(start, line.planes_of(i, start, stop)) for i in self._kept]
        elif (start, stop) != (0, line.length):
            raise CannotRewindError("this model's memory can only be exported whole")
        else:
            parts = self._states(line, range(len(self.shapes.leaves)))
        images = [image for image in line.images if start < image[0] <= stop]
        return _pack(self.identity, Blob(start, stop, parts, images))

    def import_range(
        self, line: SequenceCache, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        """Append tokens [start, stop) of an exported block; BackendFailure, having appended
        nothing, on anything else."""
        block = _unpack(self.identity, data)
        if not block.start <= start < stop <= block.stop:
            raise BackendFailure("this is not an exported KV block of these tokens")
        pieces = self.layout.plain or self.apart
        if not pieces and (start, stop, block.start) != (0, block.stop, 0):
            raise CannotRewindError("this model's memory can only be imported whole")
        self._check(block, self._kept if pieces else range(len(self.shapes.leaves)))
        line.leave_batch()
        if pieces:
            for i, part in zip(self._kept, block.parts, strict=True):
                line.leaves[i].write(
                    [a[:, :, start - block.start : stop - block.start] for a in part.arrays],
                    start - line.start_of(i),
                )
            # Until their state comes.
            for leaf in [line.leaves[i] for i in self._state]:
                if isinstance(leaf, Attention):
                    leaf.planes, leaf.rows.starts = None, [stop]
        else:
            self._fill(line, range(len(line.leaves)), block)
            # A line that can be cut comes in many blocks: its buffers are made when the last one is
            # there.
            mx.eval(arrays_of(line.leaves))
        line.images = line.images + [image for image in block.images if start < image[0] <= stop]
        line.continue_at(stop)

    def _state_of(self, line: SequenceCache) -> Blob:
        """Windows and recurrent state behind all tokens of `line`."""
        self.stepper.recompute(line)
        return Blob(line.length, line.length, self._states(line, self._state))

    def state_bytes(self, line: SequenceCache) -> int:
        return _packed_bytes(self.identity, self._state_of(line))

    def export_state(self, line: SequenceCache) -> bytes:
        return _pack(self.identity, self._state_of(line))

    def load_state(self, line: SequenceCache, block: Blob) -> None:
        """Cut `line` to where the state in `block`, which `read_state` has found good, was taken,
        and give it that."""
        self.stepper.undo_ahead_of(line)
        line.leave_batch()
        self._fill(line, self._state, block)
        line.continue_at(block.stop)

    def read_state(self, data: bytes | memoryview, n_tokens: int) -> Blob:
        """The state in `data`; BackendFailure where it is not one of this model behind
        `n_tokens`."""
        block = _unpack(self.identity, data)
        if (block.start, block.stop) != (n_tokens, n_tokens):
            raise BackendFailure(f"this is not the state behind {n_tokens} tokens")
        self._check(block, self._state)
        return block

    def _states(self, line: SequenceCache, which: Sequence[int]) -> list[BlobPart]:
        """What the leaves of those numbers hold at the end of `line`; of a window what the next
        token sees."""
        recurrent = iter(self.stepper.recurrent_state(line))
        parts = []
        for i in which:
            if not self.shapes.slots[i]:
                parts.append(BlobPart(line.length, next(recurrent)))
                continue
            first, window = line.start_of(i), self.shapes.windows[i]
            if window is not None:
                first = max(first, line.length - (window - 1))
            parts.append(BlobPart(first, line.planes_of(i, first, line.length)))
        return parts

    def _fill(self, line: SequenceCache, which: Sequence[int], block: Blob) -> None:
        for i, part in zip(which, block.parts, strict=True):
            leaf = line.leaves[i]
            if isinstance(leaf, Attention):
                leaf.planes, leaf.rows.starts = None, [part.position]
                leaf.write(part.arrays, 0)
            else:
                leaf.cache = list(part.arrays)

    def _check(self, block: Blob, which: Sequence[int]) -> None:
        """The block's arrays are such as this model makes for the leaves of those numbers."""
        fits = len(block.parts) == len(which)
        starts: dict[int | None, int] = {}
        for part, i in zip(block.parts, which, strict=False):
            arrays, slots = self.shapes.leaves[i], self.shapes.slots[i]
            fits = fits and _same_arrays(part.arrays, arrays, axis=2 if slots else None)
            if slots and fits:
                # Layers of one window begin at one place.
                start = starts.setdefault(self.shapes.windows[i], part.position)
                tokens = {int(a.shape[2]) for a in part.arrays}
                fits = start == part.position and tokens == {block.stop - start}
        if not fits:
            raise BackendFailure("this KV block holds arrays of another shape than this model's")
