"""All requests in the engine: those that wait and those that run, and their pending events. Every
request leaves the engine through this module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from localllm.engine.cache.matching import PrefixHistory
from localllm.engine.cache.pool import SequencePool
from localllm.engine.messages import Event, Failure, Finish, FinishReason, Prefill, Queued, Text
from localllm.engine.metrics import Metrics
from localllm.engine.prefill_slices import SlicedPrefill
from localllm.engine.request import RunningRequest
from localllm.engine.sampling.grammar import COMPILE_S
from localllm.engine.scheduler import Shares, StepDemand
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.tokens import Tokens, media_boundary
from localllm_backends.contract import CannotRewindError

_PREFILL_EVENT_S = 0.25
_COMPILE_AGAIN = "the processor is busy with other work: send the request again"


@dataclass
class RequestTable:
    """Requests by id: `waiting` in order of arrival, `running` in order of admission.

    `events` are not sent yet. `shares` counts the tokens computed for each tenant.
    """

    pool: SequencePool
    speculator: Speculator
    prefill: SlicedPrefill
    metrics: Metrics
    clock: Callable[[], float]
    history: PrefixHistory = field(default_factory=PrefixHistory)
    shares: Shares = field(default_factory=Shares)
    waiting: dict[str, RunningRequest] = field(default_factory=dict)
    running: dict[str, RunningRequest] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    _progress_s: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running)

    def find(self, request_id: str) -> RunningRequest | None:
        """The request with that id, waiting or running."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    @property
    def decoding(self) -> bool:
        """True while any request is past its prefill."""
        return any(not job.prefilling for job in self.running.values())

    @property
    def all_blocked(self) -> bool:
        """True if the only work is to wait for a grammar, or for a reader of KV."""
        if not all(job.blocked for job in self.running.values()):
            return False
        jobs = (*self.running.values(), *self.waiting.values())
        return any(job.blocked for job in jobs)

    def steppable(self) -> list[RunningRequest]:
        """The running requests that could be in the next step, with any adapters."""
        return [j for j in self.running.values() if j.steppable and not self.prefill.excludes(j)]

    def demand(self, job: RunningRequest, now_s: float) -> StepDemand:
        """What a request can use in the next step."""
        prefill = 0
        decode = 0
        if job.prefilling:
            prefill = job.until_checkpoint
        else:
            decode = 1 + len(job.draft)
        return StepDemand(
            job.id,
            prefill,
            decode,
            now_s - job.arrived_s,
            self.shares.tokens_computed(job.share_key),
        )

    def overview(self) -> list[dict[str, Any]]:
        """Every request as plain values, without any text of its prompt: running requests in order
        of admission, then the waiting ones."""
        return [
            job.overview(
                "waiting" if job.id in self.waiting else "prefill" if job.prefilling else "decode"
            )
            for job in (*self.running.values(), *self.waiting.values())
        ]

    def enter(self, job: RunningRequest) -> None:
        """Add a request to the waiting ones."""
        present = (*self.waiting.values(), *self.running.values())
        self.shares.keep_only(other.share_key for other in present)
        self.waiting[job.id] = job
        self.shares.add_requester(job.share_key)
        self.metrics.requests += 1

    def queued(self, job: RunningRequest) -> Queued:
        """The event that a request is waiting, with the number of requests ahead of it."""
        return Queued(job.id, len(self.waiting) - 1 + len(self.running))

    def take_compiled(self) -> None:
        """Continue requests whose grammar is compiled. If a grammar can't be enforced, its request
        fails. A tool call is made without its grammar instead."""
        for job in [*self.waiting.values(), *self.running.values()]:
            compilation = job.compilation
            if compilation is None or not compilation.done:
                continue
            job.compilation = None
            constraint = job.sampler.constraint
            assert constraint is not None
            if compilation.matcher is not None:
                constraint.use(compilation.grammar, compilation.matcher)
            elif constraint.in_call:
                constraint.give_up()
            elif compilation.was_late:
                message = f"the grammar of the answer was not compiled within {COMPILE_S:g} s"
                self.fail(job, Failure(job.id, "server_busy", message, _COMPILE_AGAIN))
                continue
            else:
                message = f"the constraint can't be enforced: {compilation.refused}"
                self.fail(job, Failure(job.id, "unsupported_parameter", message))
                continue
            if not job.admissions:
                self.events.append(self.queued(job))

    def drain(self) -> list[Event]:
        """Return the pending events and clear them."""
        events = self.events
        self.events = []
        return events

    def detach(self, job: RunningRequest, *, keep: bool) -> int | None:
        """Remove a request from all tables. Returns its sequence, which the caller then owns; from
        now on `n_kv` counts its tokens. `keep`: the caller will use the sequence, so it must
        contain all computed tokens."""
        self.waiting.pop(job.id, None)
        self.running.pop(job.id, None)
        self._progress_s.pop(job.id, None)
        self.speculator.forget(job)
        self.prefill.forget(job, keep=keep)
        for compilation in (job.compilation, job.expected):
            if compilation is not None:
                compilation.abandoned = True
        if job.reading is not None:
            self.pool.kv.disk.reads.release(job.reading)
            job.reading = None
        if job.restoring is not None:
            job.restoring.close()
        if job.fetch is not None:
            job.fetch.close()
            job.fetch = None
        sequence = job.sequence
        job.sequence = None
        job.restoring = None
        return sequence

    def finish(
        self, job: RunningRequest, reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """End a request that completed, was cancelled or can't continue. Its KV is kept for others
        if it shares."""
        rest = job.text.flush() if reason != "cancelled" else ""
        if rest:
            self.events.append(Text(job.id, rest))
        if job.text.stopped_by is not None:
            reason = "stop"
        self.release(job, keep=job.shares)
        end = Finish(job.id, reason, job.usage(), job.timings(self.clock()), job.text.stopped_by)
        self.events.append(end if failure is None else failure)

    def release(self, job: RunningRequest, *, keep: bool) -> None:
        """Remove a request and return its sequence to the pool, which may `keep` it for others."""
        sequence = self.detach(job, keep=keep)
        if sequence is None:
            return
        tokens = job.cache_tokens(0, 0)
        if keep:
            tokens = self._held_tokens(job, sequence)
            self.history.add(tokens)
        self.pool.release(sequence, tokens, keep=keep)

    def _held_tokens(self, job: RunningRequest, sequence: int) -> Tokens:
        """The tokens in `sequence`, which belonged to the request. A partial image at the end is
        removed."""
        n = media_boundary(job.tokens, job.n_kv)
        if n < job.n_kv:
            try:
                self.pool.cut(sequence, n)
            except CannotRewindError:
                n = 0
        return job.cache_tokens(0, n)

    def park(self, job: RunningRequest) -> None:
        """Take a running request out of the context to wait again. Its computed KV stays in the
        cache."""
        sequence = self.detach(job, keep=job.shares)
        assert sequence is not None
        tokens = self._held_tokens(job, sequence)
        if job.shares:
            self.pool.park(sequence, tokens)
        else:
            self.pool.release(sequence, tokens, keep=False)
        job.parked_tokens = max(job.parked_tokens, job.n_kv)
        job.n_kv = 0
        job.draft = []
        self.waiting[job.id] = job
        self.metrics.parked += 1

    def fail(self, job: RunningRequest, failure: Failure) -> None:
        """End a request with a failure, and discard its KV."""
        self.release(job, keep=False)
        self.events.append(failure)

    def expire(self) -> None:
        now = self.clock()
        for job in [*self.running.values(), *self.waiting.values()]:
            limit = job.request.generation.time_limit_s
            if limit is not None and now - job.submitted_s > limit:
                self.finish(job, "length")

    def progress(self, job: RunningRequest, n_kv: int) -> None:
        """Report from time to time how much of the request's prompt is read."""
        now = self.clock()
        if now - self._progress_s.get(job.id, 0.0) >= _PREFILL_EVENT_S:
            self._progress_s[job.id] = now
            self.events.append(Prefill(job.id, min(n_kv, job.n_prompt), job.n_prompt, job.cached))
