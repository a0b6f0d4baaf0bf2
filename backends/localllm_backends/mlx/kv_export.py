"""A sequence's memory as bytes, and back: KV of any of its tokens and, apart from that, the state behind its last one; or, where
there is nothing but state or several machines hold it, everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from localllm_backends.contract import BackendFailure, CannotRewindError
from localllm_backends.mlx import blob
from localllm_backends.mlx.attention import LineAttention
from localllm_backends.mlx.sequence_cache import Layout, SequenceCache, Shapes, arrays_of
from localllm_backends.mlx.stepping import Stepper


@dataclass
class KvExport:
    """Reads and fills lines. `apart`: windows and recurrent state are exported apart from the KV that every token keeps."""

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
        """KV of tokens [start, stop) behind a header (blob.py)."""
        if line.replay or not (self.layout.plain or self.apart):
            self.stepper.settle(line)
            self.stepper.read_again(line)
        if self.layout.plain or self.apart:
            parts = [blob.BlobPart(start, self._kv(line, i, start, stop)) for i in self._kept]
        elif (start, stop) != (0, line.length):
            raise CannotRewindError("this model's memory can only be exported whole")
        else:
            parts = self._states(line, range(len(self.shapes.leaves)))
        return blob.pack(self.identity, blob.Blob(start, stop, parts))

    def import_range(self, line: SequenceCache, data: bytes | memoryview, start: int, stop: int) -> None:
        """Append tokens [start, stop) of an exported block; BackendFailure, having appended nothing, on anything else."""
        block = blob.unpack(self.identity, data)
        if not block.start <= start < stop <= block.stop:
            raise BackendFailure("this is not an exported KV block of these tokens")
        pieces = self.layout.plain or self.apart
        if not pieces and (start, stop, block.start) != (0, block.stop, 0):
            raise CannotRewindError("this model's memory can only be imported whole")
        self._check(block, self._kept if pieces else range(len(self.shapes.leaves)))
        line.leave_batch()
        if pieces:
            for i, part in zip(self._kept, block.parts, strict=True):
                line.leaves[i].write([a[:, :, start - block.start : stop - block.start] for a in part.arrays], start)
            # Until their state comes.
            for leaf in [x for i in self._state if isinstance(x := line.leaves[i], LineAttention)]:
                leaf.planes, leaf.start, leaf.offset = None, stop, stop
        else:
            self._fill(line, range(len(line.leaves)), block)
            # A line that can be cut comes in many blocks: its buffers are made when the last one is there.
            mx.eval(arrays_of(line.leaves))
        line.continue_at(stop)

    def state(self, line: SequenceCache) -> blob.Blob:
        """Windows and recurrent state behind all tokens of `line`."""
        self.stepper.read_again(line)
        return blob.Blob(line.length, line.length, self._states(line, self._state))

    def load_state(self, line: SequenceCache, block: blob.Blob) -> None:
        """Cut `line` to where the state in `block`, which `read_state` has found good, was taken, and give it that."""
        self.stepper.settle(line)
        line.leave_batch()
        for i in self._kept:
            line.leaves[i].offset = block.stop
        self._fill(line, self._state, block)
        line.continue_at(block.stop)

    def read_state(self, data: bytes | memoryview, n_tokens: int) -> blob.Blob:
        """The state in `data`; BackendFailure where it is not one of this model behind `n_tokens`."""
        block = blob.unpack(self.identity, data)
        if (block.start, block.stop) != (n_tokens, n_tokens):
            raise BackendFailure(f"this is not the state behind {n_tokens} tokens")
        self._check(block, self._state)
        return block

    def _kv(self, line: SequenceCache, i: int, start: int, stop: int) -> list[Any]:
        if line.batch is None:
            return list(line.leaves[i].read(start, stop))
        row = line.batch.row_of(line)
        return [p[row : row + 1, :, start:stop, :] for p in line.batch.leaves[i].planes]

    def _states(self, line: SequenceCache, which: Sequence[int]) -> list[blob.BlobPart]:
        """What the leaves of those numbers hold at the end of `line`; of a window what the next token sees."""
        row = None if line.batch is None else line.batch.row_of(line)
        leaves = line.leaves if line.batch is None else line.batch.leaves
        recurrent = iter(self.stepper.recurrent_state(line))
        parts = []
        for i in which:
            if not self.shapes.slots[i]:
                parts.append(blob.BlobPart(line.length, next(recurrent)))
                continue
            leaf, window = leaves[i], self.shapes.windows[i]
            start = leaf.start if row is None else leaf.rows.starts[row]
            first = 0 if window is None else max(0, line.length - start - (window - 1))
            rows = slice(None) if row is None else slice(row, row + 1)
            parts.append(
                blob.BlobPart(start + first, [p[rows, :, first : line.length - start, :] for p in leaf.planes])
            )
        return parts

    def _fill(self, line: SequenceCache, which: Sequence[int], block: blob.Blob) -> None:
        for i, part in zip(which, block.parts, strict=True):
            leaf = line.leaves[i]
            if isinstance(leaf, LineAttention):
                leaf.offset = 0
                leaf.write(part.arrays, part.position)
            else:
                leaf.cache = list(part.arrays)

    def _check(self, block: blob.Blob, which: Sequence[int]) -> None:
        """The block's arrays are such as this model makes for the leaves of those numbers."""
        fits = len(block.parts) == len(which)
        for part, i in zip(block.parts, which, strict=False):
            slots = self.shapes.slots[i]
            fits = fits and blob.same_arrays(part.arrays, self.shapes.leaves[i], axis=2 if slots else None)
            tokens = {int(a.shape[2]) for a in part.arrays} if slots and fits else set()
            fits = fits and (not slots or (len(tokens) == 1 and part.position + next(iter(tokens)) == block.stop))
        if not fits:
            raise BackendFailure("this KV block holds arrays of another shape than this model's")
