"""Every request in the engine's hands: who waits, who runs, what is to be said of them, and the one
way out for each."""

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
from localllm.engine.scheduler import Shares, Want
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.tokens import Tokens, image_boundary
from localllm_backends.contract import CannotRewindError

_PREFILL_EVENT_S = 0.25


@dataclass
class RequestTable:
    """`waiting` and `running` by id, in order of arrival and admission; `events` not told yet.
    `shares`: who of those that ask has had how much."""

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
        """The job of that id, waiting or running."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    @property
    def decoding(self) -> bool:
        """True while somebody's answer is being written."""
        return any(not job.prefilling for job in self.running.values())

    @property
    def compiling_alone(self) -> bool:
        """True while there is nothing to do but to wait for somebody's grammar."""
        if any(job.compilation is None for job in self.running.values()):
            return False
        jobs = (*self.running.values(), *self.waiting.values())
        return any(job.compilation is not None for job in jobs)

    def want(self, job: RunningRequest, now_s: float) -> Want:
        """What a job asks of the next step."""
        prefill = 0
        decode = 0
        if job.prefilling:
            prefill = job.until_checkpoint
        else:
            decode = 1 + len(job.draft)
        return Want(
            job.id, prefill, decode, now_s - job.arrived_s, self.shares.computed_for(job.sharer)
        )

    def overview(self) -> list[dict[str, Any]]:
        """Every job as plain values, without a word of its prompt: those that run in order of
        admission, then those that wait."""
        return [
            job.overview(
                "waiting" if job.id in self.waiting else "prefill" if job.prefilling else "decode"
            )
            for job in (*self.running.values(), *self.waiting.values())
        ]

    def enter(self, job: RunningRequest) -> None:
        """A request joins those that wait."""
        self.waiting[job.id] = job
        self.shares.arrive(job.sharer)
        self.metrics.requests += 1

    def queued(self, job: RunningRequest) -> Queued:
        """What says that it waits, and behind how many."""
        return Queued(job.id, len(self.waiting) - 1 + len(self.running))

    def take_compiled(self) -> None:
        """Those whose grammar is compiled go on. One that can't be enforced ends its request; if
        it is a tool call's, the call is made without it."""
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
            else:
                said = f"the constraint can't be enforced: {compilation.refused}"
                self.fail(job, Failure(job.id, "unsupported_parameter", said))
                continue
            if not job.admissions:
                self.events.append(self.queued(job))

    def drain(self) -> list[Event]:
        """What happened since the last call."""
        events = self.events
        self.events = []
        return events

    def detach(self, job: RunningRequest, *, keep: bool) -> int | None:
        """Take a job out of everybody's hands; returns its sequence, which is the caller's now, and
        whose tokens are counted by `n_kv` from here on. `keep`: the caller has a use for them, so
        that all that are computed must be among them."""
        self.waiting.pop(job.id, None)
        self.running.pop(job.id, None)
        self._progress_s.pop(job.id, None)
        self.speculator.forget(job)
        self.prefill.forget(job, keep=keep)
        for compilation in (job.compilation, job.expected):
            if compilation is not None:
                compilation.left = True
        if job.reading is not None:
            self.pool.kv.disk.reads.release(job.reading)
            job.reading = None
        if job.restoring is not None:
            job.restoring.close()
        sequence = job.sequence
        job.sequence = None
        job.restoring = None
        return sequence

    def finish(
        self, job: RunningRequest, reason: FinishReason, failure: Failure | None = None
    ) -> None:
        """It ended well, or its client left, or it can't go on: its KV stays for others if it
        shares."""
        rest = job.text.flush() if reason != "cancelled" else ""
        if rest:
            self.events.append(Text(job.id, rest))
        if job.text.stopped_by is not None:
            reason = "stop"
        self.release(job, keep=job.shares)
        end = Finish(job.id, reason, job.usage(), job.timings(self.clock()), job.text.stopped_by)
        self.events.append(end if failure is None else failure)

    def release(self, job: RunningRequest, *, keep: bool) -> None:
        """Take it out; its sequence goes back to the pool, which may `keep` it for others."""
        sequence = self.detach(job, keep=keep)
        if sequence is None:
            return
        held = job.line(0, 0)
        if keep:
            held = self._held_tokens(job, sequence)
            self.history.add(held)
        self.pool.release(sequence, held, keep=keep)

    def _held_tokens(self, job: RunningRequest, sequence: int) -> Tokens:
        """What `sequence`, which was the job's, holds, without half an image at its end."""
        n = image_boundary(job.tokens, job.n_kv)
        if n < job.n_kv:
            try:
                self.pool.cut(sequence, n)
            except CannotRewindError:
                n = 0
        return job.line(0, n)

    def park(self, job: RunningRequest) -> None:
        """Take a running job out of the context, to wait for its turn again; what it has read stays
        in the cache."""
        sequence = self.detach(job, keep=job.shares)
        assert sequence is not None
        held = self._held_tokens(job, sequence)
        if job.shares:
            self.pool.park(sequence, held)
        else:
            self.pool.release(sequence, held, keep=False)
        job.parked_tokens = max(job.parked_tokens, job.n_kv)
        job.n_kv = 0
        job.draft = []
        self.waiting[job.id] = job
        self.metrics.parked += 1

    def fail(self, job: RunningRequest, failure: Failure) -> None:
        """It ended badly: its KV is nobody's any more."""
        self.release(job, keep=False)
        self.events.append(failure)

    def expire(self) -> None:
        now = self.clock()
        for job in [*self.running.values(), *self.waiting.values()]:
            limit = job.request.generation.time_limit_s
            if limit is not None and now - job.submitted_s > limit:
                self.finish(job, "length")

    def progress(self, job: RunningRequest, n_kv: int) -> None:
        """Say now and then how much of its prompt is read."""
        now = self.clock()
        if now - self._progress_s.get(job.id, 0.0) >= _PREFILL_EVENT_S:
            self._progress_s[job.id] = now
            self.events.append(Prefill(job.id, min(n_kv, job.n_prompt), job.n_prompt, job.cached))
