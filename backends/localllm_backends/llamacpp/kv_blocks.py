"""KV and states as bytes: a header with the tokens and images of a block, then llama.cpp's own
sequence state.

For models with sliding windows or recurrent layers, llama.cpp writes two sections: the attention KV
of every token, then the state (the window's cells, the recurrent tensors). It writes either both,
or only the state (LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY). So the first section is the difference of
the two. Followed by an empty second section, it can be imported piece by piece.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from localllm_backends.contract import BackendFailure
from localllm_backends.llamacpp.cells import PlacedMedia

# Magic numbers: KV of tokens; the same followed by the KV of draft heads; a state.
KV = b"LKV2"
KV_WITH_HEADS = b"LKM2"
STATE = b"LKS2"
# Magic number, first token, end token (exclusive), largest position, and number of images. Then for
# each image: its first token, its number of tokens, and its number of positions.
_HEADER = struct.Struct("<4sIIII")
_IMAGE = struct.Struct("<III")
# llama.cpp writes a magic number and the sequence's id before the sections, and does not check
# them.
_PREFIX_BYTES = 8
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


def header(
    magic: bytes, start: int, stop: int, last: int, images: Sequence[PlacedMedia] = ()
) -> bytes:
    """Return the header of a block with tokens [start, stop) and largest position `last`."""
    fixed = _HEADER.pack(magic, start, stop, last, len(images))
    return fixed + b"".join(_IMAGE.pack(*image) for image in images)


def parse_block(
    data: bytes | memoryview, magic: bytes
) -> tuple[int, int, int, list[PlacedMedia], memoryview]:
    """Return the arguments of `header`, and the block after it.

    Raises BackendFailure for other data.
    """
    view = memoryview(data)
    if len(view) <= _HEADER.size:
        raise BackendFailure("the data is too short to be an exported KV block")
    found_magic, start, stop, last, n_images = _HEADER.unpack_from(view)
    begin = _HEADER.size + n_images * _IMAGE.size
    if found_magic != magic or begin > len(view):
        raise BackendFailure("the data is not an exported KV block of these tokens")
    images = [PlacedMedia(*image) for image in _IMAGE.iter_unpack(view[_HEADER.size : begin])]
    return start, stop, last, images, view[begin:]


def _is_second_section(section: bytes, written: bytes) -> bool:
    """Return whether the sequence data `written` ends with `section`, after another section."""
    return len(written) - _PREFIX_BYTES > len(section) and written.endswith(section)


class SequenceMemory:
    """The sequences in the memory of one llama_context.

    `partial`: only the state. After `separate_states` succeeds, `export` and `append` handle only
    the attention KV. A sequence then has no valid state after `append`.
    """

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama = llama
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._missing = llama.missing("states")
        self._flags = (0, 0 if self._missing else llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)
        # llama.cpp's bytes for the state of an empty sequence, if states are separate.
        self._no_state = b""

    def separate_states(self, sequence: int, scratch: int) -> bool:
        """Handle states separately from now on, if llama.cpp's format allows it.

        `sequence` holds a token and `scratch` is empty. Returns False unless both are written as
        two sections.
        """
        if self._missing:
            return False
        both = self.write(sequence)
        state = self.write(sequence, partial=True)[_PREFIX_BYTES:]
        empty_sequence = self.write(scratch)
        no_state = self.write(scratch, partial=True)
        empty = no_state[_PREFIX_BYTES:]
        if not len(state) > len(empty) > 0:
            return False
        if not _is_second_section(state, both) or not _is_second_section(empty, empty_sequence):
            return False
        self._no_state = no_state
        return True

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Share the cells of positions [start, stop) of `source` with `target`."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def cut(self, sequence: int, position: int = -1) -> bool:
        """Remove everything from `position` on (-1: everything).

        Returns False if this memory can't be cut there.
        """
        return bool(self._llama.llama_memory_seq_rm(self._memory, sequence, position, -1))

    def first(self, sequence: int) -> int:
        """Return the first position that the memory holds completely."""
        return int(self._llama.llama_memory_seq_pos_min(self._memory, sequence))

    def end(self, sequence: int) -> int:
        """Return the position after the last one."""
        return int(self._llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def size(self, sequence: int, *, partial: bool = False) -> int:
        """Return the bytes of `write`. Raises BackendFailure if this llama.cpp saves no
        sequences."""
        if self._missing:
            raise BackendFailure(f"this llama.cpp saves no sequences: {self._missing}")
        get = self._llama.llama_state_seq_get_size_ext
        return int(get(self._context, sequence, self._flags[partial]))

    def write(self, sequence: int, header: bytes = b"", *, partial: bool = False) -> bytes:
        """Return all of `sequence` as bytes, after `header`.

        llama.cpp writes directly into the bytes object, without a copy: first access to new memory
        is half of an export's cost. CPython's PyBytes_FromStringAndSize permits writing to an
        object that has no other reference yet. Raises BackendFailure if llama.cpp fails.
        """
        size = self.size(sequence, partial=partial)
        # CPython shares empty and one-byte objects, so the size must be at least 2.
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
        """Load data from `write` into `sequence`. Raises BackendFailure if llama.cpp rejects the
        data."""
        if self._missing:
            raise BackendFailure(f"this llama.cpp restores no sequences: {self._missing}")
        pointer = np.frombuffer(raw, dtype=np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n_read = self._llama.llama_state_seq_set_data_ext(
            self._context, pointer, len(raw), sequence, self._flags[partial]
        )
        if n_read != len(raw):
            raise BackendFailure(
                "llama.cpp rejected this KV block: it comes from another "
                "model or has another KV type"
            )

    def export(
        self, sequence: int, start: int, stop: int, scratch: int, header: bytes = b""
    ) -> bytes:
        """Return the data of positions [start, stop).

        If they are only a part of the sequence, they are copied into the empty sequence `scratch`
        first.
        """
        if scratch == sequence:
            return self.write(sequence, header)
        self.copy(sequence, scratch, start, stop)
        try:
            if not self._no_state:
                return self.write(scratch, header)
            # `via` shares the recurrent state of the source. Empty it, so that it is not copied
            # with every piece.
            self.read(scratch, self._no_state, partial=True)
            both = self.write(scratch, header)
            state_bytes = self.size(scratch, partial=True) - _PREFIX_BYTES
            return both[: len(both) - state_bytes]
        finally:
            self.cut(scratch)

    def append(
        self,
        sequence: int,
        raw: bytes | memoryview,
        start: int,
        stop: int,
        scratch: int,
        ends: range,
    ) -> None:
        """Append positions [start, stop) of `raw`.

        If this sequence already holds tokens, import into the empty sequence `scratch` first.
        Raises BackendFailure, without appending, if llama.cpp rejects the data or if the data's end
        is not in `ends`.
        """
        no_state = self._no_state[_PREFIX_BYTES:]
        try:
            self.read(scratch, b"".join([raw, no_state]) if no_state else raw)
            if not no_state and self.end(scratch) not in ends:
                raise BackendFailure(
                    "llama.cpp rejected this KV block: its tokens differ from its header"
                )
            if scratch != sequence:
                self.copy(scratch, sequence, start, stop)
        except BackendFailure:
            self.cut(scratch)
            raise
        if scratch != sequence:
            self.cut(scratch)

    def load_state(self, sequence: int, data: bytes | memoryview, n_tokens: int, last: int) -> None:
        """Set the state of `sequence` that was exported after `n_tokens`, with largest position
        `last`.

        Raises BackendFailure if the data is rejected. The old state is lost then.
        """
        _, exported_tokens, _, _, state = parse_block(data, STATE)
        if exported_tokens != n_tokens:
            raise BackendFailure(f"the data is not the state after {n_tokens} tokens")
        self.read(sequence, state, partial=True)
        if self.end(sequence) <= last:
            raise BackendFailure(
                "llama.cpp rejected this state: it does not end at the expected position"
            )

    def separate_windows(self, sequences: Iterable[int]) -> None:
        """Give each of the `sequences` its own cells for its window.

        llama.cpp reuses a cell outside the window only if one sequence holds it. Cells that forks
        share stay taken. They fill the window's memory, which has room for one window per sequence.
        """
        written = [(s, self.write(s, partial=True)) for s in sequences]
        refused: list[tuple[int, bytes]] = []
        for sequence, state in written:
            try:
                self.read(sequence, state, partial=True)
            except BackendFailure:
                refused.append((sequence, state))
        # Reading a state frees the sequence's old cells, even if it then fails for lack of free
        # cells. After all old cells are freed, a second attempt finds room.
        for sequence, state in refused:
            self.read(sequence, state, partial=True)
