"""KV and states as bytes: llama.cpp's own sequence state behind a header that says which tokens and
images it holds.

Of a model with sliding windows or recurrent layers llama.cpp writes two sections: the attention KV
of every token, then the state (the window's cells, the recurrent tensors), and either both or the
state alone (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY). So the first section is what the two differ by;
read back with an empty second one, it can be joined piece by piece.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from localllm_backends.contract import BackendFailure
from localllm_backends.llamacpp.cells import PlacedImage

# KV of tokens, and with that of draft heads behind it; the state behind some.
KV = b"LKV2"
KV_WITH_HEADS = b"LKM2"
STATE = b"LKS2"
# The magic number, the first token and the one behind the last, the largest position among them,
# and how many images they have: each with its first token, its tokens and its positions.
_HEADER = struct.Struct("<4sIIII")
_IMAGE = struct.Struct("<III")
# Before the sections llama.cpp writes a magic number and the sequence's id, which it does not look
# at again.
_PREFIX_BYTES = 8
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def header(
    magic: bytes, start: int, stop: int, last: int, images: Sequence[PlacedImage] = ()
) -> bytes:
    """What stands before a block of the tokens [start, stop), the `last` position among them."""
    fixed = _HEADER.pack(magic, start, stop, last, len(images))
    return fixed + b"".join(_IMAGE.pack(*image) for image in images)


def opened(
    data: bytes | memoryview, magic: bytes
) -> tuple[int, int, int, list[PlacedImage], memoryview]:
    """What `header` was given, and the block behind it. BackendFailure for anything else."""
    view = memoryview(data)
    if len(view) <= _HEADER.size:
        raise BackendFailure("this is not an exported KV block: too short")
    found, start, stop, last, n_images = _HEADER.unpack_from(view)
    begin = _HEADER.size + n_images * _IMAGE.size
    if found != magic or begin > len(view):
        raise BackendFailure("this is not an exported KV block of these tokens")
    images = [PlacedImage(*image) for image in _IMAGE.iter_unpack(view[_HEADER.size : begin])]
    return start, stop, last, images, view[begin:]


def _is_second_section(section: bytes, written: bytes) -> bool:
    """Return whether the sequence as `written` ends with `section` and has another before it."""
    return len(written) - _PREFIX_BYTES > len(section) and written.endswith(section)


class SequenceMemory:
    """The sequences in the memory of one llama_context. `partial`: their states alone. Once those
    are had apart (`part_states`), `export` and `append` are of the attention KV, and a sequence
    that was appended to has no state."""

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama = llama
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._flags = (llama.LLAMA_STATE_SEQ_FLAGS_NONE, llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        # The state of an empty sequence as llama.cpp writes it, where states are had apart.
        self._no_state = b""

    def part_states(self, sequence: int, spare: int) -> bool:
        """Have states apart from now on, if llama.cpp writes `sequence`, which holds a token, and
        the empty `spare` as the two sections that this relies on."""
        both = self.write(sequence)
        state = self.write(sequence, partial=True)[_PREFIX_BYTES:]
        nothing = self.write(spare)
        no_state = self.write(spare, partial=True)
        empty = no_state[_PREFIX_BYTES:]
        if not len(state) > len(empty) > 0:
            return False
        if not _is_second_section(state, both) or not _is_second_section(empty, nothing):
            return False
        self._no_state = no_state
        return True

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
        n_written = self._llama.llama_state_seq_get_data_ext(
            self._context, target, size, sequence, self._flags[partial]
        )
        if not size or n_written != size:
            raise BackendFailure("llama.cpp could not export the KV of this sequence")
        return data

    def read(self, sequence: int, raw: bytes | memoryview, *, partial: bool = False) -> None:
        """Give `sequence` what `write` gave. BackendFailure when llama.cpp refuses."""
        pointer = np.frombuffer(raw, dtype=np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n_read = self._llama.llama_state_seq_set_data_ext(
            self._context, pointer, len(raw), sequence, self._flags[partial]
        )
        if n_read != len(raw):
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
            if not self._no_state:
                return self.write(via, header)
            # Recurrent state was shared with `via`: it need not be copied out with every piece.
            self.read(via, self._no_state, partial=True)
            both = self.write(via, header)
            state_bytes = self.size(via, partial=True) - _PREFIX_BYTES
            return both[: len(both) - state_bytes]
        finally:
            self.cut(via)

    def append(
        self,
        sequence: int,
        raw: bytes | memoryview,
        start: int,
        stop: int,
        via: int,
        ends: range,
    ) -> None:
        """Append the positions [start, stop) of `raw`, by way of the empty sequence `via` where it
        is not empty itself. BackendFailure, having appended nothing, when llama.cpp refuses or what
        it read `ends` elsewhere."""
        no_state = self._no_state[_PREFIX_BYTES:]
        try:
            self.read(via, b"".join([raw, no_state]) if no_state else raw)
            if not no_state and self.end(via) not in ends:
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

    def load_state(self, sequence: int, data: bytes | memoryview, n_tokens: int, last: int) -> None:
        """Give `sequence` the state exported behind `n_tokens`, the `last` position among them.
        BackendFailure where that is refused; its old state is gone then."""
        _, behind, _, _, state = opened(data, STATE)
        if behind != n_tokens:
            raise BackendFailure(f"this is not the state behind {n_tokens} tokens")
        self.read(sequence, state, partial=True)
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
