"""Fill a llama_batch from numpy arrays in microseconds, run an interruptible llama_decode on it,
and read the logits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localllm_backends.contract import Chunk, StepResult
from localllm_backends.llamacpp.top_logits import TopLogits

Rows = NDArray[np.float32]


class Batch:
    """A llama_batch with up to `capacity` tokens. Call `clear`, then `add` for each run of tokens.

    If `width` is set, each entry has a row of that many numbers, in addition to its token, or
    instead of it if `tokens` is False. In the latter case a position may have several `dimensions`.
    """

    def __init__(
        self, llama: Any, capacity: int, *, width: int = 0, tokens: bool = True, dimensions: int = 1
    ) -> None:
        i32 = ctypes.POINTER(ctypes.c_int32)
        f32 = ctypes.POINTER(ctypes.c_float)
        i8 = ctypes.POINTER(ctypes.c_int8)
        self._token: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._pos: NDArray[np.int32] = np.zeros(capacity * dimensions, dtype=np.int32)
        self._n_seq: NDArray[np.int32] = np.ones(capacity, dtype=np.int32)
        self._seq: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self._logits: NDArray[np.int8] = np.zeros(capacity, dtype=np.int8)
        pointers = self._seq.ctypes.data + 4 * np.arange(capacity, dtype=np.uint64)
        self._seq_pointers: NDArray[np.uint64] = pointers
        self.rows: Rows = np.zeros((capacity, width), dtype=np.float32)
        self.native = llama.llama_batch()
        if tokens:
            self.native.token = self._token.ctypes.data_as(i32)
        if width:
            self.native.embd = self.rows.ctypes.data_as(f32)
        self.native.pos = self._pos.ctypes.data_as(i32)
        self.native.n_seq_id = self._n_seq.ctypes.data_as(i32)
        self.native.seq_id = self._seq_pointers.ctypes.data_as(ctypes.POINTER(i32))
        self.native.logits = self._logits.ctypes.data_as(i8)

    def clear(self) -> None:
        self.native.n_tokens = 0

    def add(self, sequence: int, start: int, tokens: Sequence[int], outputs: int) -> None:
        """Append `tokens` at positions from `start`; the last `outputs` of them want logits."""
        i = self.native.n_tokens
        n = len(tokens)
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

    def add_row(self, token: int, position: int, sequence: int, row: Rows, *, output: bool) -> None:
        self.rows[self.native.n_tokens] = row
        self.add(sequence, position, [token], int(output))

    def place(self, positions: NDArray[np.int32]) -> None:
        """Set the positions of all entries: int32 [dimensions, entries]."""
        self._pos[: positions.size] = positions.ravel()

    def place_text(self) -> None:
        """Repeat each entry's position in all dimensions but the last, as for text (M-RoPE)."""
        n = self.native.n_tokens
        if len(self._pos) > len(self._token):
            at = self._pos[:n].copy()
            self.place(np.stack([at, at, at, np.zeros_like(at)]))


def floats(pointer: Any, rows: int, width: int) -> Rows:
    """Return a view of `rows` × `width` numbers in llama.cpp's memory."""
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    assert address is not None
    kind = ctypes.c_float * (rows * width)
    flat: Rows = np.frombuffer(memoryview(kind.from_address(address)), dtype=np.float32)
    return flat.reshape(rows, width)


class LlamaCppStepResult(StepResult):
    """Logits of the last step: a view of llama.cpp's own output rows.

    `rows` returns the given number of rows. Reading them waits for the device. For the chunks with
    the indices `top_k_chunks`, the device selects the top-k logits, which `top` reads.
    """

    def __init__(
        self,
        rows: Callable[[int], Rows],
        chunks: Sequence[Chunk],
        top: TopLogits | None = None,
        top_k_chunks: Sequence[int] = (),
    ) -> None:
        self._read = rows
        self._chunks = chunks
        self._top = top
        self._top_k_chunks = top_k_chunks
        self._ends = list(accumulate(min(c.outputs, len(c.tokens)) for c in chunks))

    @cached_property
    def rows(self) -> Rows:
        """The rows of all chunks. Rows of `top_k_chunks` are undefined."""
        return self._read(self._ends[-1])

    @cached_property
    def _tokens(self) -> list[int | None]:
        """The token that the top-k logits determine for each chunk; None if they don't."""
        undecided: list[int | None] = [None] * len(self._chunks)
        if self._top is None:
            return undecided
        return self._top.read(self._chunks, self._top_k_chunks)

    def argmax(self, chunk: int) -> list[int]:
        # A sampled token need not be the best one.
        if self._chunks[chunk].sample is None:
            token = self._tokens[chunk]
            if token is not None:
                return [token]
        return [int(row.argmax()) for row in self.logits(chunk)]

    def sampled(self, chunk: int) -> int | None:
        if self._chunks[chunk].sample is None:
            return None
        return self._tokens[chunk]

    def logits(self, chunk: int) -> Rows:
        if self._top is not None and chunk in self._top_k_chunks:
            return self._top.row(self._chunks[chunk].sequence)
        start = self._ends[chunk - 1] if chunk else 0
        return self.rows[start : self._ends[chunk]]


# Steps with more tokens compute long between barriers, so more threads are always better, even if
# other processes run. The abort callback costs 1 µs per node. That is negligible for such steps,
# but 5 % of a one-token step of a small model.
_SHORT_TOKENS = 32
# Return code of an aborted llama_decode (llama.h).
ABORTED = 2


class Decoder:
    """llama_decode of one context, which another thread may interrupt.

    The context was created with the largest number of threads it may use.
    """

    def __init__(self, llama: Any, context: Any) -> None:
        self._llama = llama
        self._context = context
        vocab = llama.llama_model_get_vocab(llama.llama_get_model(context))
        self._n_vocab = int(llama.llama_vocab_n_tokens(vocab))
        self._n_threads_long = int(llama.llama_n_threads(context))
        self._n_threads_short = self._n_threads_long
        self._abort_requested = False
        self._abort_callback = llama.ggml_abort_callback(self._should_abort)
        self._no_abort_callback = llama.ggml_abort_callback()

    def _should_abort(self, _user_data: Any) -> bool:
        return self._abort_requested

    def use_threads(self, max_threads: int) -> None:
        """Use at most `max_threads` threads for short steps from now on."""
        self._n_threads_short = max(1, min(max_threads, self._n_threads_long))

    def decode(self, batch: Any, *, interruptible: bool = True) -> int:
        """Return llama_decode's code; `ABORTED` if `interrupt` was called during the step.

        If `interruptible` is False, the step can't be aborted in the middle.
        """
        is_short = batch.n_tokens <= _SHORT_TOKENS
        n_threads = self._n_threads_short if is_short else self._n_threads_long
        self._llama.llama_set_n_threads(self._context, n_threads, n_threads)
        abortable = interruptible and not is_short
        if abortable:
            self._llama.llama_set_abort_callback(self._context, self._abort_callback, None)
        try:
            return int(self._llama.llama_decode(self._context, batch))
        finally:
            self._abort_requested = False
            if abortable:
                self._llama.llama_set_abort_callback(self._context, self._no_abort_callback, None)

    def logits(self, n: int) -> Rows:
        """Return the `n` rows of the last step [n, n_vocab], in llama.cpp's memory.

        The next step overwrites them.
        """
        if not n:
            return np.empty((0, self._n_vocab), dtype=np.float32)
        return floats(self._llama.llama_get_logits(self._context), n, self._n_vocab)

    def interrupt(self) -> None:
        """End the running `decode`, unless it is short. Between decodes, end the next one.

        May be called from any thread.
        """
        self._abort_requested = True
