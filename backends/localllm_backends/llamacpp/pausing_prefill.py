"""A long prompt read beside the streams: a second context that computes node by node and can be
paused at any of them.

llama.cpp computes a micro-batch in one go, and on a CPU a large one takes seconds while a small one
wastes them: its tiled attention starts at 64 rows (ops.cpp, ggml_compute_forward_flash_attn_ext).
So the prompt is read in large micro-batches on a thread of its own, which stops between graph nodes
(`cb_eval`) whenever its time is up. While it is paused there it also computes the steps of the
backend that owns it: two threads that compute in turn have OpenMP helpers each, more than there are
processors, and sleep at their barriers (threads.py).
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

# On a CPU as quick as 512, llama.cpp's own choice (3,000 tokens of SmolLM2, 4 rounds: 0.97 to 1.00
# of its time; 128 take 4 to 12 % longer), and its nodes half as long: attention behind 2,500
# tokens, 18 ms with 512, left a third of a slice unused. The first is smaller, to learn what its
# nodes take; later ones are where a node takes too long.
MICRO_BATCH = 256
_FIRST_BATCH = 128
_SMALLEST_BATCH = 64
# A pause is possible after every so many graph nodes. Launching the threads anew costs
# microseconds, a large matrix product or attention milliseconds: few of them may come together.
_NODES = 3
_PIECE_TOKENS = 128
_LINE = 0
_SPARE = 1


class PausingPrefill(PrefillSlices):
    """`tokens` that follow what `sequence` holds, computed in slices by `run` and then appended to
    it by `join`."""

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
        # Of the owner: None to go on, or what it wants computed meanwhile. To the owner: what came
        # of that, or whether all has been computed, told at each pause.
        self._orders: SimpleQueue[Callable[[], int] | None] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        # Between two nodes, so that it can do something else.
        self.paused = False
        self._callback = llama.ggml_backend_sched_eval_callback(self._at_node)
        self._abort = llama.ggml_abort_callback(_always)
        self._context: Any = None
        self.memory: Any = None
        self._made = threading.Event()
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
        """Compute for about `seconds`, more only by one node; returns how many of the tokens are
        computed so far. BackendFailure when there is no memory for it, or llama.cpp failed."""
        until = time.perf_counter() + seconds
        # Memory nobody has touched yet takes the system up to milliseconds per MB: what the slice
        # does not suffice for goes on beside the step.
        if not self._made.wait(seconds):
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

    def beside(self, step: Callable[[], int]) -> int:
        """`step()`, computed by the thread of the prompt where that is paused, so that only one
        thread has helpers."""
        if not self.paused:
            return step()
        self._orders.put(step)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        return int(answer)

    def join(self) -> int:
        """Append one piece of what is computed to the sequence; returns how many tokens are still
        to be appended. NoCellsError (nothing appended) when the backend has no room."""
        start = self._prefix + self._joined
        stop = self._prefix + min(self._read, self._joined + _PIECE_TOKENS)
        if start < stop:
            header = kv_blocks.header(kv_blocks.KV, start, stop, stop - 1)
            data = self.memory.export(_LINE, start, stop, _SPARE, header)
            self._backend.import_range(self._sequence, data, start, stop)
            self._joined = stop - self._prefix
        return len(self._tokens) - self._joined

    def stop(self) -> int:
        """End the micro-batch that is being computed, in its middle; returns how many tokens those
        before it have. May be called at any time, `run` not any more."""
        self._stopping = True
        self.paused = False
        if self._context is not None:
            # Ends the whole computation. The answer False of a node would end only what one device
            # computes at a time, and the next one would go on from what was never computed: expert
            # numbers out of range abort the process.
            self._llama.llama_set_abort_callback(self._context, self._abort, None)
        self._orders.put(None)
        self._thread.join()
        return self._read

    def close(self) -> None:
        self.stop()
        if self._context is not None:
            self._llama.llama_free(self._context)

    def _copy_prefix(self) -> None:
        """Copy one piece of what the sequence holds already."""
        start = self._copied
        stop = min(self._prefix, self._copied + _PIECE_TOKENS)
        data = self._backend.export_range(self._sequence, start, stop)
        *_, kv = kv_blocks.opened(data, kv_blocks.KV)
        self.memory.append(_LINE, kv, start, stop, _SPARE, range(stop, stop + 1))
        self._copied = stop

    # --- the thread that computes -----------------------------------------------------------------

    def _make(self, model: Any, cells: LoadSpec) -> None:
        """On a thread of its own that gives way to those of a step: a step beside it took up to 165
        ms instead of 6, waiting at each of its barriers for the processor that clears the
        memory."""
        lower_priority()
        try:
            self._context = new_context(model, cells, n_seq_max=2, at_node=self._callback)
            self.memory = kv_blocks.SequenceMemory(self._llama, self._context)
        except Exception as e:
            self._failure = _as_failure(e)
        self._made.set()

    def _work(self) -> None:
        self._made.wait()
        self._wait()
        try:
            if self._failure is None:
                self._compute()
        except Exception as e:
            self._failure = _as_failure(e)
        # Whatever happened: the owner waits for this.
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
                # Ended in its middle llama.cpp takes all of its cells back. One that came to its
                # end all the same counts.
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
        """llama.cpp asks before each node whether to stop after it, and tells when it has."""
        if ask:
            return self._timer.stops_here()
        if not self._stopping and self._timer.time_is_up():
            self._answers.put(False)
            self._wait()
            self._timer.resume()
        return True

    def _wait(self) -> None:
        """Until the owner says to go on; what it wants computed meanwhile is computed here."""
        for work in iter(self._orders.get, None):
            try:
                self._answers.put(work())
            except Exception as e:
                self._answers.put(e)


class PauseTimer:
    """When to pause: before a stretch of nodes that would go past `until`, judged by the same
    stretch last time."""

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

    def stops_here(self) -> bool:
        """Is the node that is asked about the last of a stretch?"""
        return next(self._nodes) % _NODES == 0

    def time_is_up(self) -> bool:
        """A stretch is done: should the next one wait?"""
        now = self._clock()
        self._spent.append(now - self._since)
        self._since = now
        following = len(self._spent)
        if following < len(self._before):
            was_s = sum(self._before[:following])
            # It is deeper now, and the machine may be slower than it was.
            slower = 1.0
            if was_s > 0:
                slower = max(1.0, sum(self._spent) / was_s)
            now += slower * self._before[following]
        return now > self.until

    def resume(self) -> None:
        self._since = self._clock()

    @property
    def too_coarse(self) -> bool:
        """Did many stretches of the last micro-batch take longer than is wanted? (One may have been
        disturbed.)"""
        longest = sorted(self._spent, reverse=True)[: max(1, len(self._spent) // 20)]
        return bool(longest) and longest[-1] > self.longest_wanted_s


def _always(_user_data: Any) -> bool:
    return True


def _as_failure(error: Exception) -> BackendFailure:
    """What ended the thread, as the only kind of error that crosses the contract."""
    if isinstance(error, BackendFailure):
        return error
    return StepError(f"{type(error).__name__}: {error}")


def cells_for(n_tokens: int) -> int:
    """KV cells of a context that holds `n_tokens`: llama.cpp pads to 256."""
    return -(-n_tokens // 256) * 256
