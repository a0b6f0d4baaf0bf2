"""Reads prompts while other requests decode: in chunks within the decode steps, or in time slices
between them.

A prefill chunk in a decode step must be short. Short chunks are slow if the backend's kernels need
many rows: llama.cpp on a CPU, at depth 2,500, read 100 tok/s with 16 tokens a step and 160 with
512. A backend that can pause in the middle of a pass (`Capabilities.sliced_prefill`) reads large
pieces, and every stream still gets its next token in time. The prompt then gets slices of time
between steps instead of tokens within them.

One prompt at a time is read in slices. Shorter and further prompts are read in chunks. If a request
leaves in the middle, its computed KV is kept. All other backends read prompts only in the
scheduler's chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from localllm.engine.metrics import Metrics
from localllm.engine.request import RunningRequest
from localllm.engine.scheduler import Grant, Shares
from localllm_backends.contract import Backend, BackendFailure, InterruptedStepError, PrefillSlices

# A prompt does not wait for the sliced prompt if it has less to read than this share of the rest of
# the sliced prompt. Before this limit, 600 tokens waited for 30,000. With it, a prompt waits for at
# most twice its own tokens.
_SHORTER_SHARE = 0.5


@dataclass
class SlicedPrefill:
    """Reads at most one prompt, that of `job`, between the steps.

    Prompts with fewer than `min_tokens` to read are not worth the context that slices take (0: no
    prompt is read in slices). Prompts of tenants that have received fewer tokens than the job's
    tenant (`shares`) go first, in the steps.
    """

    backend: Backend
    min_tokens: int
    metrics: Metrics
    clock: Callable[[], float]
    job: RunningRequest | None = None
    shares: Shares = field(default_factory=Shares)
    _slices: PrefillSlices | None = None
    _start: int = 0
    _stop: int = 0
    _read: int = 0
    _skipped_slice: bool = False
    _refused: set[str] = field(default_factory=set)

    def advance(
        self,
        running: Iterable[RunningRequest],
        slice_s: Callable[[], float],
        free_bytes: int | None,
    ) -> tuple[RunningRequest, int] | None:
        """Before a step: read for `slice_s`, or start a prompt if `free_bytes` of memory suffice.
        Returns the request whose prompt is read, and how many of its tokens are done."""
        if self.job is None:
            self._begin(running, free_bytes)
        job = self.job
        if job is None:
            return None
        started = self.clock()
        read = self._run(slice_s(), running)
        self.metrics.sliced_prefill(read, self.clock() - started)
        if job is self.job:
            return job, self._start + self._read
        # Start the next prompt now, so that it does not get into the step.
        self._begin(running, free_bytes)
        return None

    def _begin(self, running: Iterable[RunningRequest], free_bytes: int | None) -> None:
        """Start the long prompt that has waited longest, if another request is decoding and
        `free_bytes` of memory (None: unknown) suffice."""
        if self.job is not None or not (
            self.min_tokens and self.backend.capabilities.sliced_prefill
        ):
            return
        jobs = list(running)
        fit = [j for j in jobs if self._is_long(j) and j.id not in self._refused]
        if not fit or all(j.prefilling for j in jobs):
            return
        job = min(fit, key=lambda j: (self.shares.tokens_computed(j.share_key) or 0, j.submitted_s))
        if (
            free_bytes is not None
            and self.backend.sliced_prefill_bytes(len(job.tokens)) > free_bytes
        ):
            return
        assert job.sequence is not None
        try:
            self.backend.use_adapters(job.adapters)
            # The last token needs logits, so it goes through an ordinary step.
            self._slices = self.backend.slice_prefill(job.sequence, job.tokens[job.n_kv : -1])
        except BackendFailure:
            self._refused.add(job.id)
            return
        self.job = job
        self._start = job.n_kv
        self._stop = len(job.tokens) - 1
        self._read = 0
        self._skipped_slice = False

    def _is_long(self, job: RunningRequest) -> bool:
        """True for a long prompt with at least half of it left to read. Otherwise too much computed
        KV would have to be copied."""
        is_prefill = job.prefilling and job.running and not job.media
        return is_prefill and job.pending > self.min_tokens and job.n_kv <= job.pending

    def excludes(self, job: RunningRequest) -> bool:
        """True if a request must not be in this step. This holds for the prompt read in slices, and
        for other long prompts, which are next. It also holds for shorter prompts unless it is their
        turn."""
        if self.job is None:
            return False
        if job is self.job or not job.prefilling:
            return job is self.job
        return not self._has_priority(job) and (
            not self._skipped_slice or self._waits_for_slices(job)
        )

    def _waits_for_slices(self, job: RunningRequest) -> bool:
        """True if the job waits until the sliced prompt is read. This holds for long prompts,
        unless they have much less to read (`_SHORTER_SHARE`)."""
        rest_tokens = self._stop - self._start - self._read
        return self._is_long(job) and job.pending >= _SHORTER_SHARE * rest_tokens

    def _has_priority(self, job: RunningRequest) -> bool:
        """True if the job's tenant has received fewer tokens than the tenant of the sliced prompt.
        Then the job goes first."""
        return self.job is not None and (self.shares.tokens_computed(job.share_key) or 0) < (
            self.shares.tokens_computed(self.job.share_key) or 0
        )

    def _run(self, seconds: float, running: Iterable[RunningRequest]) -> int:
        """Read the sliced prompt for about `seconds`, and return the number of newly computed
        tokens.

        If shorter prompts among `running` need the step, every second slice is left out. After all
        tokens are computed, they are appended to the job's KV piece by piece, and then `job` is
        None. If the backend fails, the computed tokens are kept and the rest is read in chunks.
        """
        if self._slices is None or self.job is None or self._yields_to(running):
            return 0
        before = self._read
        try:
            if before < self._stop - self._start:
                self._read = self._slices.run(seconds)
            else:
                self._join(seconds)
        except BackendFailure:
            self._refused.add(self.job.id)
            self._keep()
            self.close()
        return self._read - before

    def _yields_to(self, running: Iterable[RunningRequest]) -> bool:
        """True if other prompts are read in this step instead: those of a tenant that goes first,
        or shorter prompts in every second step."""
        reading = [j for j in running if j.steppable and j.prefilling]
        if any(self._has_priority(job) for job in reading):
            return True
        shorter = any(job is not self.job and not self._waits_for_slices(job) for job in reading)
        self._skipped_slice = shorter and not self._skipped_slice
        return self._skipped_slice

    def _join(self, seconds: float) -> None:
        """Append computed pieces to the KV for about `seconds`, at least one piece."""
        assert self._slices is not None
        assert self.job is not None
        started = self.clock()
        pieces = 0
        while self._slices is not None:
            left = self._slices.join()
            self.job.n_kv = self._stop - left
            pieces += 1
            if not left:
                self.close()
            elif (self.clock() - started) * (pieces + 1) / pieces > seconds:
                break

    def _keep(self) -> None:
        """Stop computing, and append the computed tokens to the job's sequence as far as its cells
        allow, so that they are not read again. Appends all at once, because the next user of the
        sequence needs it complete."""
        if self._slices is None or self.job is None:
            return
        self._read = self._slices.stop()
        with suppress(BackendFailure):
            while self.job.n_kv < self._start + self._read:
                self.job.n_kv = self._stop - self._slices.join()

    def forget(self, job: RunningRequest, *, keep: bool) -> None:
        """Forget a request that ended or is parked. With `keep`, its sequence then holds all
        computed tokens, and its `n_kv` counts them."""
        self._refused.discard(job.id)
        if job is self.job:
            if keep:
                started = self.clock()
                before = self._read
                self._keep()
                self.metrics.sliced_prefill(self._read - before, self.clock() - started)
            self.close()

    def close(self) -> None:
        """Stop the prompt in progress."""
        slices = self._slices
        self._slices = None
        self.job = None
        if slices is not None:
            slices.close()


class PrefillInterrupt:
    """Stops a step that reads a single request's prompt when its client disconnects.

    On a large model such a step takes many seconds, and cancels are handled between steps. A step
    that several requests share is not stopped. May be called from any thread.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = None
        if backend.capabilities.interruptible:
            self._backend = backend
        self._lock = threading.Lock()
        self._interruptible_id: str | None = None
        self._cancelled: set[str] = set()

    @contextmanager
    def running(self, grants: Sequence[Grant]) -> Iterator[None]:
        """Context manager around a step of `grants`. Raises InterruptedStepError if the only
        request is about to leave."""
        single_prefill = None
        if len(grants) == 1 and grants[0].prefill:
            single_prefill = grants[0].key
        with self._lock:
            if single_prefill in self._cancelled:
                raise InterruptedStepError("the client has disconnected")
            self._interruptible_id = single_prefill
        try:
            yield
        finally:
            with self._lock:
                self._interruptible_id = None

    def mark_cancelled(self, request_id: str) -> None:
        """Note that this request will be cancelled between two steps. Interrupts the current step
        if it only reads this request's prompt."""
        if self._backend is None:
            return
        with self._lock:
            self._cancelled.add(request_id)
            if self._interruptible_id == request_id:
                self._backend.interrupt()

    def forget_cancelled(self, request_id: str) -> None:
        with self._lock:
            self._cancelled.discard(request_id)
