"""Prefill of a long prompt between decode steps, in a second context that can pause after graph
nodes.

llama.cpp computes a micro-batch without interruption. On a CPU a large micro-batch takes seconds,
and a small one is inefficient: tiled attention starts at 64 rows (ops.cpp,
ggml_compute_forward_flash_attn_ext). So the prompt is computed in large micro-batches by a separate
thread, which pauses between graph nodes (`cb_eval`) when its time is up. While paused, that thread
also computes the steps of the backend. Two computing threads would have separate OpenMP helpers,
together more than there are processors, and all would sleep at barriers (threads.py).
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from localllm_backends.contract import Backend, BackendFailure, LoadSpec, PrefillSlices, StepError
from localllm_backends.llamacpp import kv_blocks
from localllm_backends.llamacpp.batch import Batch
from localllm_backends.llamacpp.context import new_context
from localllm_backends.llamacpp.native import log
from localllm_backends.llamacpp.threads import lower_priority, release_helpers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# On a CPU this is as fast as llama.cpp's default of 512 (3,000 tokens of SmolLM2, 4 rounds: 0.97 to
# 1.00 of its time; 128 takes 4 to 12 % longer). Its nodes take half as long. With 512, an attention
# node after 2,500 tokens took 18 ms and left a third of a slice unused. The first micro-batch is
# smaller, to learn the nodes' times. Later ones are smaller if a node takes too long.
MICRO_BATCH = 256
_FIRST_BATCH = 128
_SMALLEST_BATCH = 64
# A pause is possible after this many graph nodes. Restarting the threads costs microseconds; a
# large matrix product or attention takes milliseconds. So only few nodes are grouped.
_NODES = 3
_PIECE_TOKENS = 128
_LINE = 0
_SPARE = 1


class PausingPrefill(PrefillSlices):
    """Prefill of `tokens` after the present tokens of `sequence`.

    `run` computes them in slices, and `join` then appends them to the sequence.
    """

    def __init__(
        self,
        llama: Any,
        model: Any,
        spec: LoadSpec,
        backend: Backend,
        sequence: int,
        tokens: Sequence[int],
    ) -> None:
        self._llama = llama
        self._backend = backend
        self._sequence = sequence
        self._tokens = list(tokens)
        self._prefix = backend.length(sequence)
        self._copied = 0
        self._read = 0
        self._joined = 0
        self._largest = MICRO_BATCH
        self._timer = PauseTimer()
        self._failure: BackendFailure | None = None
        self._stopping = False
        # From the owner: None to continue, or a function to compute during the pause. To the owner:
        # that function's result, or at each pause whether all tokens are computed.
        self._orders: SimpleQueue[Callable[[], int] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        # True between two nodes, when the thread can do other work.
        self.paused = False
        self._callback = llama.ggml_backend_sched_eval_callback(self._at_node)
        self._abort = llama.ggml_abort_callback(_always)
        self._context: Any = None
        self.memory: Any = None
        self._context_ready = threading.Event()
        cells = replace(
            spec,
            n_ctx=cells_for(self._prefix + len(self._tokens)),
            n_batch=MICRO_BATCH,
            n_outputs=1,
        )
        threading.Thread(
            target=self._make, args=(model, cells), name="sliced-prefill-context", daemon=True
        ).start()
        self._thread = threading.Thread(target=self._work, name="sliced-prefill", daemon=True)
        self._thread.start()

    def run(self, seconds: float) -> int:
        """Compute for about `seconds`, and at most one group of nodes longer.

        Returns the number of tokens computed so far. Raises BackendFailure if memory is short or
        llama.cpp fails.
        """
        until = time.perf_counter() + seconds
        # The system may need milliseconds per MB when new memory is first used. If the slice is too
        # short for that, the context is created further while steps run.
        if not self._context_ready.wait(seconds):
            return 0
        while self._failure is None and self._copied < self._prefix:
            self._copy_prefix()
            if time.perf_counter() >= until:
                return 0
        if self._failure is None and self._read < len(self._tokens):
            self._timer.until = until
            self._timer.longest_wanted_s = seconds
            self._orders.put(None)
            self.paused = not self._answers.get()
            if self.paused:
                release_helpers(self._llama.llama_n_threads(self._context))
        if self._failure is not None:
            raise self._failure
        return self._read

    def run_step(self, step: Callable[[], int]) -> int:
        """Run `step`, on the prefill's thread if that is paused, so that only one thread has
        helpers."""
        if not self.paused:
            return step()
        self._orders.put(step)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    def join(self) -> int:
        """Append one piece of the computed tokens to the sequence.

        Returns the number of tokens still to be appended. Raises NoCellsError, without appending,
        if the backend has too few free cells.
        """
        start = self._prefix + self._joined
        stop = self._prefix + min(self._read, self._joined + _PIECE_TOKENS)
        if start < stop:
            header = kv_blocks.header(kv_blocks.KV, start, stop, stop - 1)
            data = self.memory.export(_LINE, start, stop, _SPARE, header)
            self._backend.import_range(self._sequence, data, start, stop)
            self._joined = stop - self._prefix
        return len(self._tokens) - self._joined

    def stop(self) -> int:
        """Abort the running micro-batch and return the number of tokens in the completed ones.

        May be called at any time. `run` must not be called afterwards.
        """
        self._stopping = True
        self.paused = False
        if self._context is not None:
            # This ends the complete computation. If a node's callback returned False, only the
            # current device's part would end. The next part would then continue from values that
            # were never computed, and expert numbers out of range abort the process.
            self._llama.llama_set_abort_callback(self._context, self._abort, None)
        self._orders.put(None)
        self._thread.join()
        return self._read

    def close(self) -> None:
        self.stop()
        if self._context is not None:
            self._llama.llama_free(self._context)

    def _copy_prefix(self) -> None:
        """Copy one piece of the sequence's present tokens."""
        start = self._copied
        stop = min(self._prefix, self._copied + _PIECE_TOKENS)
        data = self._backend.export_range(self._sequence, start, stop)
        *_, kv = kv_blocks.parse_block(data, kv_blocks.KV)
        self.memory.append(_LINE, kv, start, stop, _SPARE, range(stop, stop + 1))
        self._copied = stop

    # --- the thread that computes -----------------------------------------------------------------

    def _make(self, model: Any, cells: LoadSpec) -> None:
        """Create the context on a thread with lower priority than the threads of a step.

        At the same priority, a concurrent step took up to 165 ms instead of 6: at each of its
        barriers it waited for the processor that was clearing the memory.
        """
        lower_priority()
        try:
            self._context = new_context(model, cells, n_seq_max=2, at_node=self._callback)
            self.memory = kv_blocks.SequenceMemory(self._llama, self._context)
        except Exception as e:
            self._failure = _as_failure(e)
        self._context_ready.set()

    def _work(self) -> None:
        self._context_ready.wait()
        self._wait()
        try:
            if self._failure is None:
                self._compute()
        except Exception as e:
            self._failure = _as_failure(e)
        # Always, also after a failure: the owner waits for this.
        self._answers.put(True)

    def _compute(self) -> None:
        batch = Batch(self._llama, MICRO_BATCH)
        size = _FIRST_BATCH
        while self._read < len(self._tokens) and not self._stopping:
            tokens = self._tokens[self._read : self._read + size]
            batch.clear()
            batch.add(_LINE, self._prefix + self._read, tokens, 0)
            self._timer.begin(len(tokens))
            code = self._llama.llama_decode(self._context, batch.native)
            if code:
                # After an abort, llama.cpp frees all cells of the micro-batch. If it finished in
                # spite of the abort, it counts.
                if not self._stopping:
                    self._failure = StepError(
                        f"llama_decode failed with code {code}: {log.reason()}"
                    )
                break
            self._read += len(tokens)
            if self._timer.too_coarse:
                self._largest = max(_SMALLEST_BATCH, size // 2)
            size = self._largest

    def _at_node(self, _tensor: Any, ask: bool, _user_data: Any) -> bool:
        """Callback of llama.cpp: before each node (`ask`) whether to stop after it, and after such
        a node."""
        if ask:
            return self._timer.is_last_of_group()
        if not self._stopping and self._timer.time_is_up():
            self._answers.put(False)
            self._wait()
            self._timer.resume()
        return True

    def _wait(self) -> None:
        """Wait until the owner continues the prefill. Meanwhile compute the functions it sends."""
        for work in iter(self._orders.get, None):
            try:
                self._answers.put(work())
            except Exception as e:
                self._answers.put(e)


class PauseTimer:
    """Decides when to pause: before a group of nodes that would run past `until`.

    The estimate is the time of the same group in the last micro-batch.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.until = 0.0
        self.longest_wanted_s = 0.0
        self._nodes = count(1)
        self._since = 0.0
        self._before: list[float] = []
        self._spent: list[float] = []
        self._n_tokens = 0

    def begin(self, n_tokens: int) -> None:
        scale = n_tokens / self._n_tokens if self._n_tokens else 1.0
        self._before = [s * scale for s in self._spent]
        self._spent = []
        self._n_tokens = n_tokens
        self._nodes = count(1)
        self._since = self._clock()

    def is_last_of_group(self) -> bool:
        """Return whether this node is the last of a group."""
        return next(self._nodes) % _NODES == 0

    def time_is_up(self) -> bool:
        """Record a finished group. Return whether to pause before the next one."""
        now = self._clock()
        self._spent.append(now - self._since)
        self._since = now
        following = len(self._spent)
        if following < len(self._before):
            was_s = sum(self._before[:following])
            # The context is longer now, and the machine may have become slower.
            slower = 1.0
            if was_s > 0:
                slower = max(1.0, sum(self._spent) / was_s)
            now += slower * self._before[following]
        return now > self.until

    def resume(self) -> None:
        self._since = self._clock()

    @property
    def too_coarse(self) -> bool:
        """True if several groups of the last micro-batch took longer than a slice.

        A single one may have been disturbed.
        """
        longest = sorted(self._spent, reverse=True)[: max(1, len(self._spent) // 20)]
        return bool(longest) and longest[-1] > self.longest_wanted_s


def _always(_user_data: Any) -> bool:
    return True


def _as_failure(error: Exception) -> BackendFailure:
    """Turn the error that ended the thread into a BackendFailure, as the contract requires."""
    if isinstance(error, BackendFailure):
        return error
    return StepError(f"{type(error).__name__}: {error}")


def cells_for(n_tokens: int) -> int:
    """Return the KV cells of a context for `n_tokens`: llama.cpp pads to a multiple of 256."""
    return -(-n_tokens // 256) * 256
