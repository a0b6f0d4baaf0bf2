"""One llama_batch whose arrays are numpy's: filling it costs microseconds."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Batch:
    """Up to `capacity` tokens for one llama_decode: `clear`, then `add` one run of tokens after another."""

    def __init__(self, llama: Any, capacity: int) -> None:
        self._token: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._pos: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._n_seq: NDArray[np.int32] = np.ones(capacity, dtype=np.int32)
        self._seq: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._logits: NDArray[np.int8] = np.zeros(capacity, dtype=np.int8)
        pointers = self._seq.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._seq_pointers: NDArray[np.uint64] = pointers
        native = llama.llama_batch()
        i32 = ctypes.POINTER(ctypes.c_int32)
        native.token = self._token.ctypes.data_as(i32)
        native.pos = self._pos.ctypes.data_as(i32)
        native.n_seq_id = self._n_seq.ctypes.data_as(i32)
        native.seq_id = ctypes.cast(ctypes.c_void_p(int(self._seq_pointers.ctypes.data)), ctypes.POINTER(i32))
        native.logits = self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        self.native = native

    def clear(self) -> None:
        """Forget what was added."""
        self.native.n_tokens = 0

    def add(self, sequence: int, start: int, tokens: Seq[int], outputs: int) -> None:
        """Append `tokens` at positions from `start`; the last `outputs` of them want logits."""
        i, n = self.native.n_tokens, len(tokens)
        if n == 1:
            self._token[i] = tokens[0]
            self._pos[i] = start
            self._seq[i] = sequence
            self._logits[i] = 1 if outputs else 0
        else:
            self._token[i : i + n] = tokens
            self._pos[i : i + n] = np.arange(start, start + n, dtype=np.int32)
            self._seq[i : i + n] = sequence
            self._logits[i : i + n] = 0
            if outputs:
                self._logits[i + n - min(n, outputs) : i + n] = 1
        self.native.n_tokens = i + n
