"""Convert a sequence's memory to bytes and back.

It exports the KV of any range of tokens and, separately, the state after the last token. A purely
recurrent model, or one that several machines share, exports everything at once as a state.

The bytes are a header with the range of tokens, then the arrays one after another. The model
defines their types and shapes for that many tokens (Shapes).
"""

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
from localllm_backends.mlx.sequence_cache import SequenceCache
from localllm_backends.mlx.shapes import Shapes
from localllm_backends.mlx.stepping import Stepper

# Changes with the bytes that `KvExport` writes, and with the meaning of the arrays in them.
KV_LAYOUT = "mlx blocks 1"
_HEADER_BYTES = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Blob:
    """Tokens [start, stop) of a sequence, and the images that end in them (SequenceCache).

    `starts`: position of the first token in each window (Layout.windows). `leaves`: the arrays of
    each leaf.
    """

    start: int
    stop: int
    starts: list[int]
    images: list[tuple[int, int]]
    leaves: list[list[Any]] = field(default_factory=list)


@dataclass
class KvExport:
    """Exports and imports sequences.

    `identity`: the model and the format of its memory. `separate_states`: windows and recurrent
    state are exported separately from the KV that every token keeps.
    """

    identity: str
    shapes: Shapes
    stepper: Stepper
    separate_states: bool

    def __post_init__(self) -> None:
        self._layout = self.shapes.layout
        self._in_pieces = self._layout.plain or self.separate_states
        leaves = self._layout.leaves
        self._kept = [i for i, x in enumerate(leaves) if self._in_pieces and x.keeps_tokens]
        self._state = [i for i in range(len(leaves)) if i not in self._kept]

    # --- export -----------------------------------------------------------------------------------

    def export_range(self, seq: SequenceCache, start: int, stop: int) -> bytes:
        """Return the KV of tokens [start, stop) after a header."""
        if self._in_pieces:
            self.stepper.recompute(seq)
            leaves = [seq.planes_of(i, start, stop) for i in self._kept]
            images = [image for image in seq.images if start < image[0] <= stop]
            return self._pack(Blob(start, stop, [], images, leaves))
        if (start, stop) != (0, seq.length):
            raise CannotRewindError("only the complete memory of this model can be exported")
        return self.export_state(seq)

    def state_bytes(self, seq: SequenceCache) -> int:
        """Return the number of bytes of `export_state`, without computing them."""
        blob = self._state_of(seq)
        n_bytes = sum(int(a.nbytes) for a in chain.from_iterable(blob.leaves))
        return len(self._header(blob)) + n_bytes

    def export_state(self, seq: SequenceCache) -> bytes:
        return self._pack(self._state_of(seq))

    def _state_of(self, seq: SequenceCache) -> Blob:
        """Collect the state after all tokens of `seq`. A window contributes what the next token
        attends to."""
        self.stepper.recompute(seq)
        starts = []
        for window in self._layout.windows:
            held_from = seq.batch.rows[window].starts[seq.row]
            seen_from = seq.length - (window - 1)
            starts.append(max(held_from, seen_from))
        blob = Blob(0, seq.length, starts, seq.images)
        recurrent = iter(self.stepper.recurrent_state(seq))
        for i in self._state:
            leaf = self._layout.leaves[i]
            if leaf.n_arrays:
                blob.leaves.append(next(recurrent))
            else:
                first = self._first(blob, leaf.window)
                blob.leaves.append(seq.planes_of(i, first, seq.length))
        return blob

    def _first(self, blob: Blob, window: int | None) -> int:
        """Return the position of the first token in a leaf with that window."""
        if window is None:
            return blob.start
        return blob.starts[self._layout.windows.index(window)]

    def _header(self, blob: Blob) -> bytes:
        fields = {
            "of": self.identity,
            "start": blob.start,
            "stop": blob.stop,
            "starts": blob.starts,
            "images": blob.images,
        }
        header = json.dumps(fields).encode()
        return _HEADER_BYTES.pack(len(header)) + header

    def _pack(self, blob: Blob) -> bytes:
        # NumPy has no bfloat16, so arrays are converted as bytes.
        bodies: list[Any] = []
        for array in chain.from_iterable(blob.leaves):
            bodies.append(mx.contiguous(array).view(mx.uint8))
        mx.eval(bodies)
        return b"".join([self._header(blob), *(memoryview(body) for body in bodies)])

    # --- import -----------------------------------------------------------------------------------

    def import_range(
        self, seq: SequenceCache, data: bytes | memoryview, start: int, stop: int
    ) -> None:
        """Append tokens [start, stop) of an exported block.

        Raises BackendFailure, without appending, for other data.
        """
        if not self._in_pieces:
            self.load_state(seq, self.read_state(data, stop))
            return
        block = self._unpack(data, self._kept)
        if not block.start <= start < stop <= block.stop:
            raise BackendFailure("the data is not an exported KV block of these tokens")
        seq.leave_batch()
        begin = start - block.start
        end = stop - block.start
        for i, arrays in zip(self._kept, block.leaves, strict=True):
            pieces = [array[:, :, begin:end] for array in arrays]
            seq.leaves[i].write(pieces, start - seq.start_of(i))
        # Empty until the state is imported.
        for leaf in [seq.leaves[i] for i in self._state]:
            if isinstance(leaf, Attention):
                leaf.planes = None
                leaf.rows.starts = [stop]
        seq.images = seq.images + [image for image in block.images if start < image[0] <= stop]
        seq.continue_at(stop)

    def read_state(self, data: bytes | memoryview, n_tokens: int) -> Blob:
        """Return the state in `data`.

        Raises BackendFailure unless it is a state of this model after `n_tokens`.
        """
        block = self._unpack(data, self._state)
        if (block.start, block.stop) != (0, n_tokens):
            raise BackendFailure(f"the data is not the state after {n_tokens} tokens")
        return block

    def load_state(self, seq: SequenceCache, block: Blob) -> None:
        """Truncate `seq` to the length of the state in `block`, and set that state.

        `block` must come from `read_state`.
        """
        self.stepper.undo_ahead_of(seq)
        seq.leave_batch()
        for i, arrays in zip(self._state, block.leaves, strict=True):
            leaf = seq.leaves[i]
            if isinstance(leaf, Attention):
                leaf.planes = None
                leaf.rows.starts = [self._first(block, leaf.rows.window)]
                leaf.write(arrays, 0)
            else:
                leaf.cache = arrays
        seq.images = block.images
        seq.continue_at(block.stop)

    def _unpack(self, data: bytes | memoryview, which: Sequence[int]) -> Blob:
        """Return the blob in `data`, with the leaves whose numbers are in `which`.

        Raises BackendFailure unless it comes from this model and has the length for its tokens.
        """
        view = memoryview(data).cast("B")
        try:
            at = _HEADER_BYTES.size + _HEADER_BYTES.unpack_from(view)[0]
            header = json.loads(bytes(view[_HEADER_BYTES.size : at]))
            if header.pop("of") != self.identity:
                raise ValueError("it comes from another model or has another KV type")
            header["images"] = [(int(end), int(fewer)) for end, fewer in header["images"]]
            blob = Blob(**header)
            for i in which:
                arrays = []
                for like, shape in self._arrays_of(blob, i):
                    n_bytes = math.prod(shape) * like.dtype.size
                    body = np.frombuffer(view[at : at + n_bytes], np.uint8)
                    at += n_bytes
                    arrays.append(mx.array(body).view(like.dtype).reshape(shape))
                blob.leaves.append(arrays)
            if at != len(view):
                raise ValueError("its length differs from its header")
            return blob
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, struct.error) as e:
            raise BackendFailure(
                f"the data is not an exported KV block, or it is damaged: {e}"
            ) from e

    def _arrays_of(self, blob: Blob, i: int) -> Iterator[tuple[Any, list[int]]]:
        """Yield, for each array of leaf number `i`, an array of the same type and the shape for the
        tokens of `blob`."""
        leaf = self._layout.leaves[i]
        n_tokens = blob.stop - self._first(blob, leaf.window)
        for like in self.shapes.leaves[i]:
            shape = list(like.shape)
            if not leaf.n_arrays:
                shape[2] = n_tokens
            yield like, shape
