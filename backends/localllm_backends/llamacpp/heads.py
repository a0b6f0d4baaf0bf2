"""Draft heads on llama.cpp: a second context that reads what the model has read, with its hidden rows, and writes ahead."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, SequenceId
from localllm_backends.following import CANDIDATES, FollowingHeads
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


class DraftHeads(FollowingHeads[Rows]):
    """A second context, and what it does to follow the model's."""

    def __init__(self, llama: Any, target: Any, context: Any, width: int) -> None:
        super().__init__(int(llama.llama_n_batch(context)))
        functions = staging_functions(llama)
        assert functions is not None, "checked before anything was loaded"
        self._llama, self._target, self._context = llama, target, context
        self._functions = functions
        self._memory = llama.llama_get_memory(context)
        self._width = width
        vocab = llama.llama_model_get_vocab(llama.llama_get_model(context))
        self._n_vocab = int(llama.llama_vocab_n_tokens(vocab))

    @property
    def weights_bytes(self) -> int:
        """Their weights, where they are no part of the model's."""
        return 0

    @abstractmethod
    def _rows_of_step(self, n: int) -> Rows:
        """What the model knew at each of the `n` tokens of its last step: a view or a copy."""

    # --- following the model -------------------------------------------------------------------------------------

    def stepped(self, chunks: Sequence[Chunk]) -> None:
        """The model has read `chunks` in one llama_decode."""
        rows = self._rows_of_step(sum(len(c.tokens) for c in chunks))
        ends = list(accumulate(len(c.tokens) for c in chunks))
        self.follow(chunks, [list(rows[e - len(c.tokens) : e].copy()) for c, e in zip(chunks, ends, strict=True)])

    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, n_tokens, -1)

    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, n_tokens)

    def _own(self, row: Rows) -> Rows:
        return row.copy()

    def _unknown(self) -> Rows:
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
        """Append tokens [start, stop) of what `export_range` gave."""
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
        self._imported(sequence, stop, whole=whole)

    def free(self) -> None:
        self._llama.llama_free(self._context)


def best(logits: Rows) -> tuple[int, float]:
    """(the likeliest token, its probability among the ten likeliest)."""
    n = min(CANDIDATES, len(logits))
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
