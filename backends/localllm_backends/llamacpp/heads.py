"""Draft heads on llama.cpp: a second context that reads what the model has read, with its hidden rows, and writes ahead.

Its small KV (the heads' layers only) must hold what the model's holds: the same tokens at the same places, each with a row
of what the model knew just before it. What is guessed is verified by the model like any other draft, so heads that lost
their place cost acceptance and never exactness.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, SequenceId
from localllm_backends.llamacpp.batch import Batch
from localllm_backends.llamacpp.kv_blocks import written

Rows = NDArray[np.float32]

# llama-ext.h's staging functions have C++ names; Itanium mangling is the same on Linux and macOS (MSVC's is not).
SYMBOLS: dict[str, tuple[str, Any, list[Any]]] = {
    "set_rows": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, [ctypes.c_bool, ctypes.c_bool]),
    "rows": ("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, []),
    "set_head": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, [ctypes.c_int32]),
    "set_layer_rows": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, [ctypes.c_uint32, ctypes.c_bool],
    ),
    "layer_rows": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.c_void_p, [ctypes.c_uint32]),
    "target_layers": ("_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), []),
    "n_target_layers": ("_Z30llama_model_target_layer_ids_nPK11llama_model", ctypes.c_uint32, []),
    "selector_top_k": ("_Z33llama_model_dflash_selector_top_kPK11llama_model", ctypes.c_int32, []),
}  # fmt: skip
# Tokens that heads may lag behind before they read them: one sweep over their layers for all, and none for rejected drafts.
_CATCH_UP_TOKENS = 32
# Guesses that the heads themselves take for less likely than this are not worth a row of the model's sweep. Assumed: no real
# heads were measured here, and the engine learns from the stops as it does from rejections.
LEAST_PROBABILITY = 0.4
# Probabilities are taken among as many candidates, as in llama.cpp's own driver (common/speculative.cpp).
_CANDIDATES = 10


def staging_functions(llama: Any) -> dict[str, Any] | None:
    """llama.cpp's functions for hidden rows, by our names; None where this build does not export them."""
    library = llama.llama_cpp._lib
    found = {}
    for name, (symbol, result, arguments) in SYMBOLS.items():
        try:
            function = getattr(library, symbol)
        except AttributeError:
            return None
        function.restype, function.argtypes = result, [ctypes.c_void_p, *arguments]
        found[name] = function
    return found


@dataclass
class _HeadsLine:
    """A sequence as the heads know it: their KV holds positions below `read`; `unread` are the tokens from there on that the
    model has read and they have not. `rows[i]` is the hidden row before `unread[i]`; the last one is the newest."""

    read: int
    rows: list[Rows]
    unread: list[int] = field(default_factory=list)


class DraftHeads(ABC):
    """A second context, and what it does to follow the model's. Belongs to the backend's thread.

    `kind`: what they are called. `first`: the first position that they read a token at, since a row must lie before it."""

    kind: ClassVar[str]
    first: ClassVar[int] = 0

    def __init__(self, llama: Any, target: Any, context: Any, width: int) -> None:
        functions = staging_functions(llama)
        assert functions is not None, "checked before anything was loaded"
        self._llama, self._target, self._context = llama, target, context
        self._functions = functions
        self._memory = llama.llama_get_memory(context)
        self._width = width
        vocab = llama.llama_model_get_vocab(llama.llama_get_model(context))
        self._n_vocab = int(llama.llama_vocab_n_tokens(vocab))
        self._n_batch = int(llama.llama_n_batch(context))
        self._lines: dict[SequenceId, _HeadsLine] = {}

    @property
    def weights_bytes(self) -> int:
        """Their weights, where they are no part of the model's."""
        return 0

    @property
    @abstractmethod
    def longest(self) -> int:
        """Longest draft, in tokens."""

    @abstractmethod
    def draft(self, wanted: Seq[tuple[SequenceId, int, int]]) -> list[list[int]]:
        """Guesses for each (sequence, its newest token, which the model has not read, most tokens): the heads' best, shorter
        where they are not sure. Nothing of them stays in the heads' memory."""

    @abstractmethod
    def _rows_of_step(self, n: int) -> Rows:
        """What the model knew at each of the `n` tokens of its last step: a view or a copy."""

    @abstractmethod
    def _read(self, places: list[tuple[SequenceId, int]]) -> bool:
        """One sweep over these (sequence, index among its unread); False where it failed."""

    # --- following the model -------------------------------------------------------------------------------------

    def open(self, sequence: SequenceId) -> None:
        self._lines[sequence] = _HeadsLine(0, [self._unknown()])

    def close(self, sequence: SequenceId) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lines.pop(sequence, None)

    def stepped(self, chunks: Seq[Chunk]) -> None:
        """The model has read `chunks` in one llama_decode: keep their hidden rows, and read what has piled up."""
        rows = self._rows_of_step(sum(len(c.tokens) for c in chunks))
        at = 0
        late: list[SequenceId] = []
        for chunk in chunks:
            line, n = self._lines[chunk.sequence], len(chunk.tokens)
            line.unread.extend(chunk.tokens)
            line.rows.extend(rows[at : at + n].copy())
            at += n
            if len(line.unread) >= _CATCH_UP_TOKENS:
                late.append(chunk.sequence)
        self.catch_up(late)

    def truncate(self, sequence: SequenceId, n_tokens: int) -> None:
        line = self._lines[sequence]
        keep = n_tokens - line.read
        if keep >= 0:
            del line.unread[keep:], line.rows[keep + 1 :]
            return
        self._llama.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1)
        self._lines[sequence] = _HeadsLine(n_tokens, [self._unknown()])

    def fork(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        """`target` (open, empty) begins with the first `n_tokens` of `source`."""
        line = self._lines[source]
        keep = n_tokens - line.read
        held = min(n_tokens, line.read)
        if held:
            self._llama.llama_memory_seq_cp(self._memory, source, target, 0, held)
        if keep >= 0:
            self._lines[target] = _HeadsLine(held, line.rows[: keep + 1], line.unread[:keep])
        else:
            self._lines[target] = _HeadsLine(held, [self._unknown()])

    def catch_up(self, sequences: Seq[SequenceId]) -> None:
        """Read everything unread of `sequences`, in as few sweeps as the batch allows."""
        waiting = [
            (s, i)
            for s in sequences
            for i in range(max(0, self.first - self._lines[s].read), len(self._lines[s].unread))
        ]
        for begin in range(0, len(waiting), self._n_batch):
            places = waiting[begin : begin + self._n_batch]
            if not self._read(places):
                # What is left of them has no past then: they begin anew behind it.
                for sequence in {s for s, _ in places}:
                    self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        for sequence in sequences:
            line = self._lines[sequence]
            line.read += len(line.unread)
            # A copy: the row is part of its step's whole block.
            line.unread, line.rows = [], [line.rows[-1].copy()]

    def forget_drafts(self, sequences: Seq[SequenceId]) -> None:
        """Take out of the memory what is not part of these sequences."""
        for sequence in sequences:
            self._llama.llama_memory_seq_rm(self._memory, sequence, self._lines[sequence].read, -1)

    def _unknown(self) -> Rows:
        """The row before a position whose past was not seen (imported, or cut back to): zeros, as at the beginning."""
        return np.zeros(self._width, dtype=np.float32)

    # --- what a sweep gave ---------------------------------------------------------------------------------------

    def _logits(self, n: int) -> Rows:
        """The first `n` rows of logits of the heads' last llama_decode: valid until the next."""
        address = ctypes.cast(self._llama.llama_get_logits(self._context), ctypes.c_void_p).value
        return floats(address, n, self._n_vocab)

    # --- in and out ----------------------------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int, by_way_of: int) -> bytes:
        """The heads' KV of tokens [start, stop), by way of another sequence where it is not the whole."""
        self.catch_up([sequence])
        source = by_way_of
        if source != sequence:
            self._llama.llama_memory_seq_cp(self._memory, sequence, source, start, stop)
        size = self._llama.llama_state_seq_get_size(self._context, source)
        write, context = self._llama.llama_state_seq_get_data, self._context
        data = written(b"", size, lambda target: int(write(context, target, size, source)))
        if source != sequence:
            self._llama.llama_memory_seq_rm(self._memory, source, -1, -1)
        return data

    def import_range(
        self, sequence: SequenceId, data: NDArray[np.uint8], start: int, stop: int, by_way_of: int
    ) -> None:
        """Append tokens [start, stop) of what `export_range` gave. KV that doesn't fit is forgotten, not an error: the
        heads then begin to read at `stop`."""
        self.catch_up([sequence])
        target = by_way_of
        pointer = np.ascontiguousarray(data).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        read = self._llama.llama_state_seq_set_data(self._context, pointer, len(data), target)
        held = int(self._llama.llama_memory_seq_pos_max(self._memory, target)) + 1
        whole = read == len(data) and held >= stop
        if target != sequence:
            if whole:
                self._llama.llama_memory_seq_cp(self._memory, target, sequence, start, stop)
            self._llama.llama_memory_seq_rm(self._memory, target, -1, -1)
        if not whole:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        self._lines[sequence] = _HeadsLine(stop, [self._unknown()])

    def free(self) -> None:
        self._llama.llama_free(self._context)


def best(logits: Rows) -> tuple[int, float]:
    """(the likeliest token, its probability among the ten likeliest)."""
    n = min(_CANDIDATES, len(logits))
    top = np.argpartition(logits, -n)[-n:]
    values = logits[top].astype(np.float64)
    at = int(values.argmax())
    return int(top[at]), float(1.0 / np.exp(values - values[at]).sum())


def floats(address: int | None, rows: int, width: int) -> Rows:
    """A view of `rows` × `width` numbers of llama.cpp's."""
    assert address is not None
    kind = ctypes.c_float * (rows * width)
    flat: Rows = np.frombuffer(memoryview(kind.from_address(address)), dtype=np.float32)
    return flat.reshape(rows, width)


class RowBatch(Batch):
    """A llama_batch whose entries carry a row each, beside their token or (`tokens` False) instead of it. `dimensions`: the
    numbers that a position is made of where there is no token."""

    def __init__(self, llama: Any, capacity: int, width: int, *, tokens: bool = True, dimensions: int = 1) -> None:
        super().__init__(llama, capacity)
        self._rows: Rows = np.zeros((capacity, width), dtype=np.float32)
        self.native.embd = self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._spread: NDArray[np.int32] | None = None
        if not tokens:
            self.native.token = None
            if dimensions > 1:
                self._spread = np.zeros(dimensions * capacity, dtype=np.int32)
                self.native.pos = self._spread.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))

    def add_row(self, token: int, position: int, sequence: SequenceId, row: Rows, *, output: bool) -> None:
        self._rows[self.native.n_tokens] = row
        self.add(sequence, position, [token], int(output))

    def spread(self) -> None:
        """Give every entry its position in all dimensions but the last, as text has it (M-RoPE)."""
        if self._spread is not None:
            n = self.native.n_tokens
            self._spread[: 4 * n] = np.concatenate([np.tile(self._pos[:n], 3), np.zeros(n, dtype=np.int32)])
