"""How prompts are read beside running streams: in chunks within their steps, or in slices of time
between them.

A chunk of prefill beside decoding must be short, and a short chunk is dear where the backend's
kernels want many rows (llama.cpp on a CPU: at depth 2,500, 16 tokens a step read 100 tok/s where
512 read 160). A backend that can pause in the middle of a sweep (`Capabilities.sliced_prefill`)
reads large pieces and still lets every stream have its next token in time: the prompt gets slices
of time between steps instead of tokens within them. One prompt at a time; shorter ones and all
others go the ordinary way. Of one whose request leaves in the middle, what is computed stays. Every
other backend reads its prompts in the scheduler's chunks alone.
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

# Who has less to read than this part of what is left of the prompt in slices does not wait for its
# end: 600 tokens waited for 30,000. So nobody waits for more than twice as many tokens as its own.
_MUCH_LESS = 0.5


@dataclass
class SlicedPrefill:
    """At most one `job` whose prompt is being read between the steps; prompts with fewer than
    `least_tokens` to read are not worth the context it takes (0: none is, nor where the backend
    can't). Tenants that have had less than that job's (`shares`) go first, in the steps."""

    backend: Backend
    least_tokens: int
    metrics: Metrics
    clock: Callable[[], float]
    job: RunningRequest | None = None
    shares: Shares = field(default_factory=Shares)
    _slices: PrefillSlices | None = None
    _start: int = 0
    _stop: int = 0
    _read: int = 0
    _waited: bool = False
    _refused: set[str] = field(default_factory=set)

    def advance(
        self,
        running: Iterable[RunningRequest],
        slice_s: Callable[[], float],
        free_bytes: int | None,
    ) -> tuple[RunningRequest, int] | None:
        """Before a step: read for `slice_s`, or begin with a prompt if `free_bytes` of memory are
        enough. Returns the request that is read and how many tokens of it are done."""
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
        # The next one must not get into the step.
        self._begin(running, free_bytes)
        return None

    def _begin(self, running: Iterable[RunningRequest], free_bytes: int | None) -> None:
        """Take the longest waiting of the long prompts in hand if somebody else is decoding and
        `free_bytes` of memory (None: unknown) are enough."""
        if self.job is not None or not (
            self.least_tokens and self.backend.capabilities.sliced_prefill
        ):
            return
        jobs = list(running)
        fit = [j for j in jobs if self._long(j) and j.id not in self._refused]
        if not fit or all(j.prefilling for j in jobs):
            return
        job = min(fit, key=lambda j: (self.shares.computed_for(j.sharer) or 0, j.submitted_s))
        if (
            free_bytes is not None
            and self.backend.sliced_prefill_bytes(len(job.tokens)) > free_bytes
        ):
            return
        assert job.sequence is not None
        try:
            # The last token goes through a step like any other: its logits are wanted.
            self._slices = self.backend.slice_prefill(job.sequence, job.tokens[job.n_kv : -1])
        except BackendFailure:
            self._refused.add(job.id)
            return
        self.job = job
        self._start = job.n_kv
        self._stop = len(job.tokens) - 1
        self._read = 0
        self._waited = False

    def _long(self, job: RunningRequest) -> bool:
        """Is it a long prompt, and not just the end of one whose beginning would have to be
        copied?"""
        new = job.prefilling and job.running and not job.images
        return new and job.pending > self.least_tokens and job.n_kv <= job.pending

    def excludes(self, job: RunningRequest) -> bool:
        """True for what must not be in this step: the prompt that is read in slices, others as long
        (they are next), and shorter ones too unless this step is theirs."""
        if self.job is None:
            return False
        if job is self.job or not job.prefilling:
            return job is self.job
        return not self._ahead(job) and (not self._waited or self._next(job))

    def _next(self, job: RunningRequest) -> bool:
        """Does it wait until all of the prompt in slices is read? Long ones do that don't have much
        less to read."""
        left = self._stop - self._start - self._read
        return self._long(job) and job.pending >= _MUCH_LESS * left

    def _ahead(self, job: RunningRequest) -> bool:
        """Has its tenant had less than that of the prompt which is read in slices? Then it goes
        first."""
        return self.job is not None and (self.shares.computed_for(job.sharer) or 0) < (
            self.shares.computed_for(self.job.sharer) or 0
        )

    def _run(self, seconds: float, running: Iterable[RunningRequest]) -> int:
        """Spend about `seconds` on it before a step; every second time not, if shorter prompts
        among the `running` want the step. Returns the tokens newly computed. When all are, they
        become the job's KV piece by piece, and `job` is None again. Where it can't go on, what is
        computed is kept and the rest is read the ordinary way."""
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
        """Do others read in this step: those of a tenant that is first, and every second time
        shorter prompts?"""
        reading = [j for j in running if j.steppable and j.prefilling]
        if any(self._ahead(job) for job in reading):
            return True
        shorter = any(job is not self.job and not self._next(job) for job in reading)
        self._waited = shorter and not self._waited
        return self._waited

    def _join(self, seconds: float) -> None:
        """Append pieces of what is computed for about `seconds`, at least one."""
        assert self._slices is not None
        assert self.job is not None
        begun = self.clock()
        pieces = 0
        while self._slices is not None:
            left = self._slices.join()
            self.job.n_kv = self._stop - left
            pieces += 1
            if not left:
                self.close()
            elif (self.clock() - begun) * (pieces + 1) / pieces > seconds:
                break

    def _keep(self) -> None:
        """Compute no more, and append what is computed to the job's sequence, as far as there are
        cells for it: nobody reads that again. All at once, since whoever takes the sequence next
        wants it whole."""
        if self._slices is None or self.job is None:
            return
        self._read = self._slices.stop()
        with suppress(BackendFailure):
            while self.job.n_kv < self._start + self._read:
                self.job.n_kv = self._stop - self._slices.join()

    def forget(self, job: RunningRequest, *, keep: bool) -> None:
        """The request leaves the engine's hands: it ended, or is parked. `keep`: what is computed
        for it must be in its sequence then, and counted by its `n_kv`."""
        self._refused.discard(job.id)
        if job is self.job:
            if keep:
                started = self.clock()
                before = self._read
                self._keep()
                self.metrics.sliced_prefill(self._read - before, self.clock() - started)
            self.close()

    def close(self) -> None:
        """Stop whatever is under way."""
        slices = self._slices
        self._slices = None
        self.job = None
        if slices is not None:
            slices.close()


class PrefillInterrupt:
    """Ends a step that reads one request's prompt and nothing else when its client leaves: on a
    large model such a step takes many seconds, and cancels are taken up between steps. A step that
    others share goes on. Any thread may call."""

    def __init__(self, backend: Backend) -> None:
        self._backend = None
        if backend.capabilities.interruptible:
            self._backend = backend
        self._lock = threading.Lock()
        self._reading: str | None = None
        self._leaving: set[str] = set()

    @contextmanager
    def running(self, grants: Sequence[Grant]) -> Iterator[None]:
        """Around a step of `grants`; InterruptedStepError before it where its only request is about
        to leave."""
        alone = None
        if len(grants) == 1 and grants[0].prefill:
            alone = grants[0].key
        with self._lock:
            if alone in self._leaving:
                raise InterruptedStepError("its client has left")
            self._reading = alone
        try:
            yield
        finally:
            with self._lock:
                self._reading = None

    def leave(self, request_id: str) -> None:
        """This request will be cancelled between two steps."""
        if self._backend is None:
            return
        with self._lock:
            self._leaving.add(request_id)
            if self._reading == request_id:
                self._backend.interrupt()

    def left(self, request_id: str) -> None:
        with self._lock:
            self._leaving.discard(request_id)
