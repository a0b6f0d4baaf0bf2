"""Exported KV as bytes: llama.cpp's own sequence state behind a 16-byte header that says which tokens it holds."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
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
    if not 0 < size < end:
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
