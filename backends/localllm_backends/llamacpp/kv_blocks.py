"""KV and states as bytes: llama.cpp's own sequence state behind a 16-byte header that says which
tokens it holds.

Of a model with sliding windows or recurrent layers llama.cpp writes two sections: the attention KV
of every token, then the state (the window's cells, the recurrent tensors), and either both or the
state alone (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY). So the first section is what the two differ by;
read back with an empty second one, it can be joined piece by piece.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from localllm_backends.contract import BackendFailure

# KV of a plain memory; with draft heads, whose KV lies behind the model's; without the state.
MAGIC, MAGIC_MTP, MAGIC_SPLIT = b"LKV1", b"LKM1", b"LKA1"
_STATE = b"LKS1"
HEADER = struct.Struct("<4sIII")
# Before the sections llama.cpp writes a magic number and the sequence's id, which it does not look
# at again.
_PREFIX_BYTES = 8
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def span(data: bytes | memoryview, magic: bytes) -> tuple[int, int]:
    """(first, last) of a block: it holds the tokens [first, last). BackendFailure for anything
    else."""
    if len(data) <= HEADER.size:
        raise BackendFailure("this is not an exported KV block: too short")
    found, first, last, _ = HEADER.unpack_from(data, 0)
    if found != magic:
        raise BackendFailure("this is not an exported KV block of these tokens")
    return first, last


class SequenceMemory:
    """The sequences in the memory of one llama_context. `partial`: their states alone."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama, self._context = llama, context
        self._memory = llama.llama_get_memory(context)
        self._flags = (llama.LLAMA_STATE_SEQ_FLAGS_NONE, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """`target` holds the positions [start, stop) of `source` as well: cells are shared."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def cut(self, sequence: int, position: int = -1) -> bool:
        """Take out what lies from `position` on (-1: everything); False where this memory can't be
        cut there."""
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, position, -1))

    def first(self, sequence: int) -> int:
        """The first position of which everything is held."""
        return int(self._llama.llama_memory_seq_pos_min(self._memory, sequence))

    def end(self, sequence: int) -> int:
        """The position behind the last one."""
        return int(self._llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def size(self, sequence: int, *, partial: bool = False) -> int:
        get = self._llama.llama_state_seq_get_size_ext
        return int(get(self._context, sequence, self._flags[partial]))

    def write(self, sequence: int, header: bytes = b"", *, partial: bool = False) -> bytes:
        """All of `sequence`, behind `header`. BackendFailure if llama.cpp won't give it.

        Not copied into bytes afterwards: memory that is touched for the first time is half of what
        an export costs. CPython's PyBytes_FromStringAndSize allows to fill what nobody else has
        yet."""
        size = self.size(sequence, partial=partial)
        # A single byte, or none, is everybody's.
        data: bytes = _new_bytes(None, max(len(header) + size, 2))
        at = np.frombuffer(data, dtype=np.uint8).ctypes.data
        ctypes.memmove(at, header, len(header))
        target = ctypes.cast(at + len(header), ctypes.POINTER(ctypes.c_uint8))
        get = self._llama.llama_state_seq_get_data_ext
        if not size or get(self._context, target, size, sequence, self._flags[partial]) != size:
            raise BackendFailure("llama.cpp could not export the KV of this sequence")
        return data

    def read(self, sequence: int, raw: bytes | memoryview, *, partial: bool = False) -> None:
        """Give `sequence` what `write` gave. BackendFailure when llama.cpp refuses."""
        pointer = np.frombuffer(raw, dtype=np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = self._llama.llama_state_seq_set_data_ext
        if read(self._context, pointer, len(raw), sequence, self._flags[partial]) != len(raw):
            raise BackendFailure(
                "llama.cpp refused this KV block: it was written by another model or KV type"
            )

    def export(self, sequence: int, start: int, stop: int, via: int, header: bytes = b"") -> bytes:
        """The positions [start, stop), by way of the empty sequence `via` where they are not all of
        it."""
        if via == sequence:
            return self.write(sequence, header)
        self.copy(sequence, via, start, stop)
        try:
            return self.write(via, header)
        finally:
            self.cut(via)

    def append(
        self,
        sequence: int,
        raw: bytes | memoryview,
        start: int,
        stop: int,
        via: int,
        ends: range | None = None,
    ) -> None:
        """Append the positions [start, stop) of `raw`, by way of the empty sequence `via` where it
        is not empty itself. BackendFailure, having appended nothing, when llama.cpp refuses or what
        it read `ends` elsewhere."""
        try:
            self.read(via, raw)
            if ends is not None and self.end(via) not in ends:
                raise BackendFailure(
                    "llama.cpp refused this KV block: it holds other tokens than it says"
                )
            if via != sequence:
                self.copy(via, sequence, start, stop)
        except BackendFailure:
            self.cut(via)
            raise
        if via != sequence:
            self.cut(via)


class SplitMemory(SequenceMemory):
    """One whose sequences are written in those two sections, the attention KV by `export` and
    `append`. `spare` is a sequence nobody else uses."""

    def __init__(self, llama: Any, context: Any, spare: int) -> None:
        super().__init__(llama, context)
        self._nothing, self._empty = self.write(spare), self.write(spare, partial=True)

    def splits(self, sequence: int) -> bool:
        """Does llama.cpp write this sequence, which holds a token, as the two sections this relies
        on?"""
        both, state = self.write(sequence), self.write(sequence, partial=True)[_PREFIX_BYTES:]
        empty = self._empty[_PREFIX_BYTES:]
        return (
            len(both) - _PREFIX_BYTES > len(state) > len(empty) > 0
            and both.endswith(state)
            and len(self._nothing) - _PREFIX_BYTES > len(empty)
            and self._nothing.endswith(empty)
        )

    def export(self, sequence: int, start: int, stop: int, via: int, header: bytes = b"") -> bytes:
        self.copy(sequence, via, start, stop)
        try:
            # Recurrent state was shared with the spare: it need not be copied out with every piece.
            self.read(via, self._empty, partial=True)
            both = self.write(via, header)
            return both[: len(both) - self.size(via, partial=True) + _PREFIX_BYTES]
        finally:
            self.cut(via)

    def append(
        self,
        sequence: int,
        raw: bytes | memoryview,
        start: int,
        stop: int,
        via: int,
        ends: range | None = None,
    ) -> None:
        """The sequence has no state then."""
        both = b"".join([raw, self._empty[_PREFIX_BYTES:]])
        super().append(sequence, both, start, stop, via)

    def state_size(self, sequence: int) -> int:
        return HEADER.size + self.size(sequence, partial=True)

    def export_state(self, sequence: int, n_tokens: int) -> bytes:
        """The state behind `n_tokens`, which is all that `sequence` holds."""
        return self.write(sequence, HEADER.pack(_STATE, n_tokens, n_tokens, 0), partial=True)

    def load_state(self, sequence: int, data: bytes | memoryview, n_tokens: int, last: int) -> None:
        """Give `sequence` the state exported behind `n_tokens`, the `last` position among them.
        BackendFailure where that is refused; its old state is gone then."""
        if span(data, _STATE) != (n_tokens, n_tokens):
            raise BackendFailure(f"this is not the state behind {n_tokens} tokens")
        self.read(sequence, memoryview(data)[HEADER.size :], partial=True)
        if self.end(sequence) <= last:
            raise BackendFailure("llama.cpp refused this state: it ends elsewhere")

    def separate_windows(self, sequences: Iterable[int]) -> None:
        """Give each of the `sequences` cells of its own for its window. llama.cpp uses a cell
        behind a window again only where a single sequence holds it: what forks hold together stays
        taken, and fills the memory of the window, which is made for as many windows as there are
        sequences."""
        written = [(s, self.write(s, partial=True)) for s in sequences]
        refused: list[tuple[int, bytes]] = []
        for sequence, state in written:
            try:
                self.read(sequence, state, partial=True)
            except BackendFailure:
                refused.append((sequence, state))
        # Reading a state lets go of the sequence's old one before there is room for it: the second
        # time there is.
        for sequence, state in refused:
            self.read(sequence, state, partial=True)
