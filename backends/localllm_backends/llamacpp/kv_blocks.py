"""KV and states as bytes: llama.cpp's own sequence state behind a 16-byte header that says which tokens it holds.

Of a model with sliding windows or recurrent layers llama.cpp writes two sections: the attention KV of every token, then the
state (the window's cells, the recurrent tensors), and either both or the state alone (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY).
So the first section is what the two differ by; read back with an empty second one, it can be joined piece by piece.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import BackendFailure

MAGIC = b"LKV1"
# With draft heads: their KV lies behind the model's, and its size in bytes at the end.
MAGIC_MTP = b"LKM1"
HEADER = struct.Struct("<4sIII")
_TAIL = struct.Struct("<Q")
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def written(header: bytes, size: int, write: Callable[[Any], int]) -> bytes:
    """`header`, and behind it the bytes that `write` puts at the address it is given, `size` at most; it returns how many.

    Not copied into bytes afterwards: memory that is touched for the first time is half of what an export costs. CPython's
    PyBytes_FromStringAndSize allows to fill what nobody else has yet."""
    whole = len(header) + size
    # A single byte, or none, is everybody's.
    data: bytes = _new_bytes(None, max(whole, 2))
    at = np.frombuffer(data, dtype=np.uint8).ctypes.data
    ctypes.memmove(at, header, len(header))
    end = len(header) + write(ctypes.cast(at + len(header), ctypes.POINTER(ctypes.c_uint8)))
    return data if end == len(data) else data[:end]


def packed(llama: Any, context: Any, source: int, magic: bytes, start: int, stop: int) -> bytes:
    """All that `source` holds, which are the tokens [start, stop). BackendFailure if llama.cpp won't give it."""
    size = llama.llama_state_seq_get_size(context, source)
    header = HEADER.pack(magic, start, stop, 0)
    data = written(header, size, lambda target: int(llama.llama_state_seq_get_data(context, target, size, source)))
    if len(data) == len(header):
        raise BackendFailure("llama.cpp could not export the KV of this sequence")
    return data


def with_heads(data: bytes, heads: bytes) -> bytes:
    """A block with its draft heads' KV behind it."""
    return b"".join([data, heads, _TAIL.pack(len(heads))])


def span(data: bytes | memoryview, magic: bytes) -> tuple[int, int]:
    """(first, last) of a block: it holds the tokens [first, last). BackendFailure for anything else."""
    if len(data) <= HEADER.size:
        raise BackendFailure("this is not an exported KV block: too short")
    found, first, last, _ = HEADER.unpack_from(data, 0)
    if found != magic:
        raise BackendFailure("this is not an exported KV block of these tokens")
    return first, last


def parts(data: bytes | memoryview, *, heads: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
    """(the model's KV, its heads') of a block, without its header."""
    raw = np.frombuffer(data, dtype=np.uint8)[HEADER.size :]
    if not heads:
        return raw, None
    end = len(raw) - _TAIL.size
    (size,) = _TAIL.unpack(raw[max(end, 0) :].tobytes()) if end >= 0 else (0,)
    if not 0 <= size < end:
        raise BackendFailure("this is not an exported KV block: too short")
    return raw[: end - size], raw[end - size : end]


def unpack(llama: Any, context: Any, target: int, raw: NDArray[np.uint8], last: int) -> None:
    """Make the empty sequence `target` hold `raw`, whose positions end before `last`. BackendFailure, leaving it empty,
    when llama.cpp refuses."""
    memory = llama.llama_get_memory(context)
    pointer = raw.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    read = llama.llama_state_seq_set_data(context, pointer, len(raw), target)
    held = int(llama.llama_memory_seq_pos_max(memory, target)) + 1
    if read != len(raw) or held != last:
        llama.llama_memory_seq_rm(memory, target, -1, -1)
        raise BackendFailure("llama.cpp refused this KV block: it was written by another model or KV type")


_KV, _STATE = b"LKA1", b"LKS1"
# Before the sections llama.cpp writes a magic number and the sequence's id, which it does not look at again.
_PREFIX_BYTES = 8


class States:
    """The two sections of the sequences in `context`. `spare` is a sequence nobody else uses."""

    def __init__(self, llama: Any, context: Any, spare: int) -> None:
        self._llama, self._context, self._spare = llama, context, spare
        self._memory = llama.llama_get_memory(context)
        self._empty = self._write(spare, partial=True)

    def split(self, sequence: int) -> bool:
        """Does llama.cpp write this sequence, which holds a token, as the two sections this relies on?"""
        both, state = self._write(sequence, partial=False), self._write(sequence, partial=True)[_PREFIX_BYTES:]
        nothing, empty = self._write(self._spare, partial=False), self._empty[_PREFIX_BYTES:]
        return (
            len(both) - _PREFIX_BYTES > len(state) > len(empty) > 0
            and both.endswith(state)
            and len(nothing) - _PREFIX_BYTES > len(empty)
            and nothing.endswith(empty)
        )

    def size(self, sequence: int) -> int:
        partial = self._llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        return HEADER.size + int(self._llama.llama_state_seq_get_size_ext(self._context, sequence, partial))

    def export(self, sequence: int, n_tokens: int) -> bytes:
        """The state behind `n_tokens`, which is all that `sequence` holds."""
        return self._write(sequence, partial=True, header=HEADER.pack(_STATE, n_tokens, n_tokens, 0))

    def load(self, sequence: int, data: bytes | memoryview, n_tokens: int, last: int) -> None:
        """Give `sequence` the state exported behind `n_tokens`, the `last` position among them. BackendFailure where that is
        refused; its old state is gone then."""
        self._check(data, _STATE, n_tokens, n_tokens)
        self._read(sequence, memoryview(data)[HEADER.size :], partial=True)
        if int(self._llama.llama_memory_seq_pos_max(self._memory, sequence)) < last:
            raise BackendFailure("llama.cpp refused this state: it ends elsewhere")

    def part(self, sequences: Iterable[int]) -> None:
        """Give each of the `sequences` cells of its own for its window. llama.cpp uses a cell behind a window again only where
        a single sequence holds it: what forks hold together stays taken, and fills the memory of the window, which is
        made for as many windows as there are sequences."""
        left = [(s, self._write(s, partial=True)) for s in sequences]
        # Reading a state lets go of the sequence's old one before there is room for it: the second time there is.
        left = [(s, state) for s, state in left if not self._accepts(s, state)]
        for sequence, state in left:
            self._read(sequence, state, partial=True)

    def _accepts(self, sequence: int, state: bytes) -> bool:
        try:
            self._read(sequence, state, partial=True)
        except BackendFailure:
            return False
        return True

    def export_kv(self, sequence: int, start: int, stop: int, span: tuple[int, int]) -> bytes:
        """Attention KV of the tokens [start, stop), whose positions are `span`."""
        llama, spare = self._llama, self._spare
        llama.llama_memory_seq_cp(self._memory, sequence, spare, *span)
        try:
            # Recurrent state was shared with the spare: it need not be copied out with every piece.
            self._read(spare, self._empty, partial=True)
            partial = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
            state = int(llama.llama_state_seq_get_size_ext(self._context, spare, partial)) - _PREFIX_BYTES
            both = self._write(spare, partial=False, header=HEADER.pack(_KV, start, stop, 0))
            return both[: len(both) - state]
        finally:
            llama.llama_memory_seq_rm(self._memory, spare, -1, -1)

    def import_kv(self, sequence: int, data: bytes | memoryview, span: tuple[int, int]) -> None:
        """Append the positions `span` of exported attention KV to `sequence`, which has no state then."""
        llama, spare = self._llama, self._spare
        kv = memoryview(data)[HEADER.size :]
        try:
            self._read(spare, b"".join([kv, self._empty[_PREFIX_BYTES:]]), partial=False)
            llama.llama_memory_seq_cp(self._memory, spare, sequence, *span)
        finally:
            llama.llama_memory_seq_rm(self._memory, spare, -1, -1)

    def span(self, data: bytes | memoryview) -> tuple[int, int]:
        """(first, last) of exported attention KV: it holds the tokens [first, last)."""
        if len(data) <= HEADER.size:
            raise BackendFailure("this is not an exported KV block: too short")
        magic, first, last, _ = HEADER.unpack_from(data, 0)
        if magic != _KV:
            raise BackendFailure("this is not an exported KV block of these tokens")
        return first, last

    def _check(self, data: bytes | memoryview, magic: bytes, start: int, stop: int) -> None:
        try:
            found = HEADER.unpack_from(data, 0)
        except struct.error as e:
            raise BackendFailure("this is not an exported state: too short") from e
        if found[:3] != (magic, start, stop):
            raise BackendFailure(f"this is not the state behind {stop} tokens")

    def _write(self, sequence: int, *, partial: bool, header: bytes = b"") -> bytes:
        llama, context = self._llama, self._context
        flags = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else llama.LLAMA_STATE_SEQ_FLAGS_NONE
        size = int(llama.llama_state_seq_get_size_ext(context, sequence, flags))
        data = written(
            header, size, lambda to: int(llama.llama_state_seq_get_data_ext(context, to, size, sequence, flags))
        )
        if len(data) != len(header) + size:
            raise BackendFailure("llama.cpp could not export this sequence")
        return data

    def _read(self, sequence: int, raw: bytes | memoryview, *, partial: bool) -> None:
        llama = self._llama
        flags = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY if partial else llama.LLAMA_STATE_SEQ_FLAGS_NONE
        pointer = np.frombuffer(raw, dtype=np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = llama.llama_state_seq_set_data_ext(self._context, pointer, len(raw), sequence, flags)
        if read != len(raw):
            raise BackendFailure("llama.cpp refused this block: it was written by another model or KV type")
