"""Draft heads on llama.cpp: a second context that reads what the model has read, with its hidden
rows, and writes ahead."""

from __future__ import annotations

import ctypes
import sys
from abc import abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from localllm_backends.contract import Chunk, SequenceId
from localllm_backends.following import CANDIDATES, FollowingHeads
from localllm_backends.llamacpp.batch import LogitsView, Rows
from localllm_backends.llamacpp.kv_blocks import SequenceMemory
from localllm_backends.llamacpp.native import bindings

# llama-ext.h's staging functions have C++ names; Itanium mangling is the same on Linux and macOS
# (MSVC's is not).
SYMBOLS: dict[str, tuple[str, Any, list[Any]]] = {
    "set_rows": ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None,
    [ctypes.c_bool, ctypes.c_bool]),
    "rows": ("_Z26llama_get_embeddings_nextnP13llama_context", ctypes.c_void_p, []),
    "set_head": ("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, [ctypes.c_int32]),
    "set_layer_rows": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None,
        [ctypes.c_uint32, ctypes.c_bool],
    ),
    "layer_rows": ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", ctypes.c_void_p,
    [ctypes.c_uint32]),
    "target_layers": ("_Z28llama_model_target_layer_idsPK11llama_model",
    ctypes.POINTER(ctypes.c_int32), []),
    "n_target_layers": ("_Z30llama_model_target_layer_ids_nPK11llama_model", ctypes.c_uint32, []),
    "selector_top_k": ("_Z33llama_model_dflash_selector_top_kPK11llama_model", ctypes.c_int32, []),
}  # fmt: skip


def staging_functions() -> dict[str, Any] | None:
    """llama.cpp's functions for hidden rows, by our names; None where this build does not export
    them."""
    library = bindings()._lib
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

    # The model that they are, where they are no part of another.
    _drafter: Any = None

    def __init__(self, llama: Any, target: Any, context: Any, width: int) -> None:
        super().__init__(int(llama.llama_n_batch(context)))
        functions = staging_functions()
        assert functions is not None, "checked before anything was loaded"
        self._llama, self._target, self._context = llama, target, context
        self._functions = functions
        self._memory = SequenceMemory(llama, context)
        self._width = width
        vocab = llama.llama_model_get_vocab(llama.llama_get_model(context))
        self._logits = LogitsView(llama, context, int(llama.llama_vocab_n_tokens(vocab)))

    @property
    def weights_bytes(self) -> int:
        """Their weights, where they are no part of the model's."""
        return 0 if self._drafter is None else int(self._llama.llama_model_size(self._drafter))

    @abstractmethod
    def _rows_of_step(self, n: int) -> Rows:
        """What the model knew at each of the `n` tokens of its last step: a view or a copy."""

    # --- following the model ----------------------------------------------------------------------

    def stepped(self, chunks: Sequence[Chunk]) -> None:
        """The model has read `chunks` in one llama_decode."""
        rows = self._rows_of_step(sum(len(c.tokens) for c in chunks))
        ends = list(accumulate(len(c.tokens) for c in chunks))
        self.follow(
            chunks,
            [list(rows[e - len(c.tokens) : e].copy()) for c, e in zip(chunks, ends, strict=True)],
        )

    def _cut(self, sequence: SequenceId, n_tokens: int) -> None:
        self._memory.cut(sequence, n_tokens)

    def _restart(self, sequence: SequenceId, n_tokens: int) -> None:
        self._memory.cut(sequence)

    def _copy(self, source: SequenceId, target: SequenceId, n_tokens: int) -> None:
        self._memory.copy(source, target, 0, n_tokens)

    def _detached(self, row: Rows) -> Rows:
        return row.copy()

    def _zero_row(self) -> Rows:
        return np.zeros(self._width, dtype=np.float32)

    # --- in and out -------------------------------------------------------------------------------

    def export_range(self, sequence: SequenceId, start: int, stop: int, via: int) -> bytes:
        """The heads' KV of tokens [start, stop), by way of another sequence where it is not the
        whole."""
        self.catch_up([sequence])
        return self._memory.export(sequence, start, stop, via)

    def import_range(
        self, sequence: SequenceId, data: memoryview, start: int, stop: int, via: int
    ) -> None:
        """Append tokens [start, stop) of what `export_range` gave."""
        self.catch_up([sequence])
        with self._importing(sequence, stop):
            self._memory.append(sequence, data, start, stop, via, range(stop, sys.maxsize))

    def free(self) -> None:
        self._llama.llama_free(self._context)
        if self._drafter is not None:
            self._llama.llama_model_free(self._drafter)


def best(logits: Rows) -> tuple[int, float]:
    """(the likeliest token, its probability among the ten likeliest)."""
    n = min(CANDIDATES, len(logits))
    top = np.argpartition(logits, -n)[-n:]
    values = logits[top].astype(np.float64)
    at = int(values.argmax())
    return int(top[at]), float(1.0 / np.exp(values - values[at]).sum())
