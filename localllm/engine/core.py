"""The engine's loop: it takes requests, runs steps and returns events. One thread owns the engine
and its backend.

    submit → waiting → admitted (longest known prefix restored) → prefill in chunks → decode →
    finished

`step()` shows the whole architecture. It admits requests that fit, plans one pass over the weights
(scheduler), runs it (backend), and advances every request by its output. Between steps, one piece
of a finished conversation's KV is exported to the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine import EngineSettings
from localllm.engine.adapters import AdapterTurns, unknown_adapters
from localllm.engine.admission import Admission
from localllm.engine.background import BackgroundTurns, park_less_urgent
from localllm.engine.cache.disk import tier_of
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.store import KvStore
from localllm.engine.contention import CpuContention, ThreadThrottle, of_this_process
from localllm.engine.kv_receiving import KvReceiver
from localllm.engine.kv_sending import KvSender, Outlet, no_outlet
from localllm.engine.media import MediaSteps, media_steps
from localllm.engine.messages import Event, Failure, Request, prompt_too_long
from localllm.engine.metrics import DecodeSpeedTracker, Metrics
from localllm.engine.outputs import OutputProcessor
from localllm.engine.prefill_slices import PrefillInterrupt, SlicedPrefill
from localllm.engine.request import RunningRequest, running_request
from localllm.engine.request_table import RequestTable
from localllm.engine.sampling.grammar import BackgroundCompiler, GrammarCompiler
from localllm.engine.scheduler import Grant, Limits, Shares, plan_step
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.step_costs import PROMPT_STEP_S, SINGLE_STEP_S, ChunkSizer
from localllm.engine.step_timer import StepTimer
from localllm.engine.tokens import MediaSpan
from localllm.engine.transfer.conductor import conductor_of
from localllm.limited_child import Stages
from localllm.memory.guard import Available, guard_of
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    InterruptedStepError,
    NoCellsError,
    StepResult,
)

# Interval in seconds to look for new messages, while all requests wait for a grammar, an image or
# the disk.
WAIT_S = 0.01
# Seconds between the last step and the start of housekeeping, if one piece of it takes long
# (`Engine.idle_wait_s`).
IDLE_GRACE_S = 0.05
# Intervals of an idle engine, in seconds. `MEMORY_CHECK_S`: to check whether other programs need
# its memory. `WRITING_S`: to check whether disk writes are done, so that housekeeping can go on.
MEMORY_CHECK_S = 2.0
WRITING_S = 0.02


@dataclass
class Engine:
    """Serves many requests over one backend.

    Not thread-safe on purpose: one thread makes all calls. `available` returns the bytes of memory
    that can be allocated now (None: ask the system). KV for other servers goes to `outlet`.
    `cpu` measures what other programs take of the processors.
    """

    backend: Backend
    settings: EngineSettings = field(default_factory=EngineSettings)
    clock: Callable[[], float] = time.monotonic
    draft_backend: Backend | None = None
    available: Available | None = None
    outlet: Outlet = no_outlet
    cpu: CpuContention = field(default_factory=of_this_process)

    def __post_init__(self) -> None:
        settings = self.settings
        kv = KvStore(self.backend, settings.cache_bytes, tier_of(self.backend, settings))
        self.pool = SequencePool(self.backend, kv)
        self.metrics = Metrics(self.clock())
        self.guard = guard_of(self.available, settings.headroom_bytes)
        capabilities = self.backend.capabilities
        n_batch = self.backend.info.n_batch
        self._sizer = ChunkSizer(n_batch, on_device=capabilities.kv_on_device, gap_s=settings.gap_s)
        self.speculator = Speculator(
            self.backend, self.draft_backend, settings.draft, self.clock, self.cpu, self._sizer
        )
        kv.speed = self._sizer
        self._background = BackgroundTurns(self.speculator.cost)
        self._timer = StepTimer(self.clock)
        self._worked_s = self._pause_until_s = self.clock()
        self._stalled = False
        self._housekeeping = True
        # One full state takes up to 25 ms to copy (gemma-3-270m), as long as a cached request.
        # Agents send the next request within milliseconds, so this housekeeping starts after a
        # pause. A piece of divisible KV takes 1 ms. Exported early, the same prompt is more often
        # computed over the same cells, and so gives the same bits.
        self._takes_grace = kv.states is not None and not kv.snapshots
        # With `power` below 1 known results must not wait for the pause after each step.
        self._overlaps = capabilities.asynchronous and settings.power >= 1.0
        self._observed: tuple[list[Grant], int] | None = None
        self._interrupt = PrefillInterrupt(self.backend)
        shares = Shares()
        minimum = settings.sliced_prefill_tokens
        self.prefill = SlicedPrefill(self.backend, minimum, self.metrics, self.clock, shares=shares)
        self.jobs = RequestTable(
            self.pool, self.speculator, self.prefill, self.metrics, self.clock, shares=shares
        )
        self.pool.running = self.jobs.running
        self._turns = AdapterTurns(tuple(scale for _, scale in self.backend.info.adapters))
        self._compiler = BackgroundCompiler(
            settings.make_matcher or GrammarCompiler(self.backend),
            settings.grammar_trials or Stages([]),
            kv.disk.reads.wake,
        )
        media_dir = settings.disk_dir if settings.disk_bytes > 0 else None
        self._media = media_steps(self.backend, kv.disk.reads.wake, media_dir)
        self.sender = KvSender(self.backend, self.jobs, self.outlet)
        self._conductor = conductor_of(self.backend, settings, kv.disk.reads, self._sizer)
        receiver = KvReceiver(self._conductor, self.pool, self.jobs.running, self.jobs.progress)
        self._admission = Admission(
            self.backend, self.jobs, self.guard, settings.cache_bytes, receiver
        )
        self._outputs = OutputProcessor(self.backend, self.jobs, self._compiler.start, self._media)
        self.pace = DecodeSpeedTracker(self.cpu)
        loaded = (self.backend, self.draft_backend)
        threaded = [b for b in loaded if b is not None and b.capabilities.threaded]
        yielding = threaded if self.settings.yields_threads else []
        self._throttle = ThreadThrottle(yielding, self.cpu)

    # --- in ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.jobs)

    def submit(
        self, request: Request, prompt: list[int], media: tuple[MediaSpan, ...] = ()
    ) -> list[Event]:
        """Take a request with its tokenised prompt and media.

        Returns its first event: Queued, or the Failure that ends it. A request with a grammar gets
        its first event from a later step, after the grammar is compiled.
        """
        info = self.backend.info
        if not prompt:
            return [Failure(request.id, "invalid_request", "the prompt is empty")]
        generation = request.generation
        if len(prompt) >= info.n_ctx:
            return [prompt_too_long(request.id, len(prompt), info.n_ctx)]
        refused = unknown_adapters(info, generation.adapters)
        if not refused and self._media is not None:
            refused = self._media.unreadable(media, info.n_batch)
        if refused:
            return [Failure(request.id, "invalid_request", refused)]
        before = sum(job.share_key[0] == generation.tenant for job in self.jobs.waiting.values())
        if before >= self.settings.queue_limit:
            return [Failure(request.id, "server_busy", f"{before} requests are waiting already")]
        job = running_request(request, prompt, media, self.backend, self.clock())
        self._stalled = False
        self._housekeeping = True
        self.jobs.enter(job)
        constraint = request.constraint
        if constraint is not None and constraint.grammar is not None:
            job.compilation = self._compiler.start(constraint.grammar, constraint.beginning)
            return []
        if constraint is not None and constraint.triggers:
            # Compile the grammar of the first call now: it is likely to be ready when that call
            # begins.
            first = next(iter(constraint.triggers.values()))
            job.expected = self._compiler.start(first.grammar)
        return [self.jobs.queued(job)]

    def cancel(self, request_id: str) -> list[Event]:
        """End a request now and keep its KV for reuse. Unknown ids are ignored, because the request
        may just have finished."""
        job = self.jobs.find(request_id)
        self._interrupt.forget_cancelled(request_id)
        self._stalled = False
        self._housekeeping = True
        if job is None:
            return []
        self.metrics.cancelled += 1
        self._outputs.send_text()
        self.jobs.finish(job, "cancelled")
        return self.jobs.drain()

    def interrupt(self, request_id: str) -> None:
        """Stop a step that only reads this request's prompt, because its `cancel` follows. May be
        called from any thread."""
        self._interrupt.mark_cancelled(request_id)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self, report_events: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """Run one pass over the weights for all requests that can use it, and return the events.

        Events that are known early go to `report_events` before the remaining work of the step.
        """
        began_s = self.clock()
        self._receive()
        self._admit()
        self.sender.send()
        grants = self._schedule()
        result = self._forward(grants)
        if self._overlaps:
            self._finish_step(report_events)
        if self._process(grants, result) and not (self._overlaps and self.has_work):
            self._finish_step(report_events)
        self.sender.send()
        now = self.clock()
        # If a step took longer than any planned step, the process was suspended in between.
        self._pause_until_s = now + min(now - began_s, SINGLE_STEP_S) * (
            1.0 / self.settings.power - 1.0
        )
        return self.jobs.drain()

    @property
    def can_step(self) -> bool:
        """True while a step has work to do. If all requests wait for a grammar, an image or the
        disk, call `idle` instead, which waits."""
        return self.has_work and not self._stalled

    @property
    def idle_wait_s(self) -> float:
        """Seconds that the owner may wait for a message before it calls `step` or `idle` again."""
        if self.has_work:
            return max(0.0, self._pause_until_s - self.clock())
        if self._housekeeping:
            if self._takes_grace:
                return max(0.0, IDLE_GRACE_S - (self.clock() - self._worked_s))
            return 0.0
        if self.pool.waiting:
            return WRITING_S
        return MEMORY_CHECK_S

    def idle(self) -> bool:
        """Do work that needs no step. Returns True if more of it can be done without waiting.

        If requests are running, wait for the data they need. Otherwise do one piece of
        housekeeping.
        """
        if self.has_work:
            if self._stalled:
                self.pool.kv.disk.reads.wait(WAIT_S)
            self._stalled = False
            return True
        self._admission.check_memory_pressure()
        self.pool.kv.disk.set_busy(False)
        idle_s = self.clock() - self._worked_s
        # One piece at a time keeps a new request's wait short. A piece that fails is not tried
        # again at once.
        self._housekeeping = False
        self._housekeeping = (
            self.pool.tick(busy=False)
            or self.backend.idle_work(self.guard.free_bytes)
            or self.speculator.tick(busy=False, idle_s=idle_s)
        )
        return self._housekeeping

    def _receive(self) -> None:
        """Check memory, and accept requests whose grammar is compiled."""
        self._admission.check_memory_pressure()
        self.pool.kv.disk.set_busy(True)
        self._worked_s = self.clock()
        self._housekeeping = True
        self.jobs.take_compiled()

    def _admit(self) -> None:
        """Admit requests that fit, evict idle sequences and restore cached prefixes."""
        self._admission.admit()
        self._admission.evict_idle()
        self._admission.restore()

    def _schedule(self) -> list[Grant]:
        """Plan this step: the next token and draft of every decoding sequence, and chunks of
        prompts. A prompt that is read in slices gets its next slice before that."""
        before = self.metrics.prefilled_tokens
        urgent = park_less_urgent(self.jobs)
        sliced = self.prefill.advance(urgent, self._slice_s, self.guard.free_bytes)
        if sliced is not None:
            self.jobs.shares.charge(sliced[0].share_key, self.metrics.prefilled_tokens - before)
            self.jobs.progress(*sliced)
            self._timer.interrupt()
        self._turns.choose([job.adapters for job in self.jobs.steppable()])
        drafting = [j for j in self.jobs.running.values() if j.adapters == self._turns.active]
        hurry = self.prefill.job is not None
        self.speculator.propose(drafting, hurry=hurry, shared=self._turns.others_wait)
        grants = self._plan()
        if not grants:
            self._turns.end()
        return grants

    def _slice_s(self) -> float:
        """Seconds that the next slice may take. The other requests' next step waits for it."""
        if self.jobs.decoding:
            return self._sizer.slice_s(self._timer.step_s)
        return PROMPT_STEP_S

    def _forward(self, grants: list[Grant]) -> StepResult | None:
        """Run one pass over the weights. Returns None if there are no grants or the step failed."""
        if not grants:
            return None
        self._timer.begin()
        self.backend.use_adapters(self._turns.active)
        result = None
        try:
            with self._interrupt.running(grants):
                result = self.backend.step([self._outputs.chunk(g) for g in grants])
        except InterruptedStepError:
            pass
        except NoCellsError:
            self._admission.free_cells()
        except BackendFailure as e:
            self._outputs.fail_running(e)
        for grant in grants:
            job = self.jobs.running.get(grant.key)
            if job is not None:
                self.jobs.shares.charge(job.share_key, grant.n_tokens)
        return result

    def _process(self, grants: list[Grant], result: StepResult | None) -> bool:
        """Turn the step's output into the requests' next tokens. Returns False if a step ran
        without a result."""
        if grants:
            if result is None:
                return False
            generated = self.metrics.generated_tokens
            try:
                self._outputs.advance(grants, result)
            except BackendFailure as e:
                self._outputs.fail_running(e)
                return False
            self._timer.end()
            self._turns.stepped(sum(g.n_tokens for g in grants), self._timer.step_s)
            self._observed = grants, self.metrics.generated_tokens - generated
        awaits = self._admission.awaits_disk or (self._media is not None and self._media.waiting)
        self._stalled = (
            not grants and self.prefill.job is None and (awaits or self.jobs.all_blocked)
        )
        self.jobs.expire()
        return True

    def _finish_step(self, report_events: Callable[[list[Event]], None] | None) -> None:
        """Do the work that the next step does not need: text, events, measurements and
        housekeeping.

        An asynchronous backend computes the next step meanwhile.
        """
        self._outputs.look_ahead()
        self._outputs.send_text()
        if report_events is not None and self.jobs.events:
            report_events(self.jobs.drain())
        if self._observed is not None:
            self._observe(*self._observed)
            self._observed = None
        if self.has_work or not self._takes_grace:
            self.pool.tick(busy=self.has_work, live=len(self.jobs.running))
        self.speculator.tick(busy=True)
        self._worked_s = self.clock()

    def close(self) -> None:
        """Finish exporting the resident sequences, write them to disk and free the backend."""
        self.prefill.close()
        self._conductor.close()
        self._compiler.close()
        if self._media is not None:
            self._media.encoder.close()
        self.pool.finish()
        self.pool.kv.disk.close()
        self.speculator.close()
        self.backend.close()

    # --- one step ---------------------------------------------------------------------------------

    def _plan(self) -> list[Grant]:
        now = self.clock()
        info = self.backend.info
        ready = [j for j in self.jobs.steppable() if j.adapters == self._turns.active]
        prompt_only = self._prompt_only_tokens()
        if self._media is not None:
            media = self._plan_media(self._media, ready, prompt_only)
            if media is not None:
                return [media]
            ready = [
                j for j in ready if j.id in self.jobs.running and not (j.prefilling and j.medium)
            ]
        ready = self._background.choose_requests(ready)
        if len(ready) <= info.n_outputs and all(j.decodes_without_draft for j in ready):
            return [Grant(j.id, 1, prefill=False) for j in ready]
        sizer = self._sizer
        limits = Limits(info.n_batch, info.n_outputs, sizer.chunk, prompt_only, sizer.cheap_tokens)
        return plan_step([self.jobs.demand(job, now) for job in ready], limits)

    def _prompt_only_tokens(self) -> int:
        """Prefill tokens allowed in a step without decoding.

        A single request may take a longer step if it can be interrupted. If no request shares the
        cache, the size does not depend on measured speed: then a repeated request gives the same
        bits.
        """
        jobs = [*self.jobs.waiting.values(), *self.jobs.running.values()]
        step_s = PROMPT_STEP_S
        # With `power` below 1, each step is followed by a pause in proportion, so steps stay short.
        if self._turns.others_wait and self.jobs.decoding:
            # Streams with other adapters wait for this step.
            return max(self._sizer.chunk, 1)
        if (
            len(jobs) == 1
            and self.backend.capabilities.interruptible
            and self.settings.power >= 1.0
        ):
            step_s = SINGLE_STEP_S
        named = any(job.share_key[0] for job in jobs)
        shares = any(job.shares for job in jobs)
        return self._sizer.prompt_tokens(step_s if shares else 0.0, several_keys=named)

    def _plan_media(
        self, media: MediaSteps, ready: list[RunningRequest], prompt_only: int
    ) -> Grant | None:
        """The media to read in this step. Requests whose media can't be read end here."""
        max_tokens = self._sizer.chunk if self.jobs.decoding else prompt_only
        grant = media.plan(ready, min(self.backend.info.n_batch, max_tokens))
        for job, reason in media.failed:
            self.jobs.fail(job, Failure(job.id, "invalid_request", reason))
        return grant

    # --- measuring --------------------------------------------------------------------------------

    def _observe(self, grants: list[Grant], emitted: int) -> None:
        seconds = self._timer.step_s
        prefilled = sum(g.n_tokens for g in grants if g.prefill)
        decoding = [g for g in grants if not g.prefill]
        drafted = [g.n_tokens - 1 for g in decoding]
        if decoding and not prefilled:
            self.speculator.observe(drafted, tokens=emitted, seconds=self._timer.period_s)
        if not any(drafted) and self.prefill.job is None:
            # A slice of a prompt evicts the step's data from the processor caches, so steps next to
            # slices are slower and not measured.
            self._sizer.observe(
                decoded=len(decoding),
                prefilled=prefilled,
                seconds=seconds,
                waited=emitted > 0 or not self._overlaps,
            )
            # Decode steps of a single request without drafts show how fast this start is.
            is_single = len(grants) == 1 and bool(decoding)
            job = None
            if is_single:
                job = self.jobs.running.get(grants[0].key)
            if job is not None and not job.sampler.constrained:
                self.pace.observe(len(job.tokens), seconds)
        self._throttle.stepped(seconds)
        self.metrics.step(
            decoded=len(decoding), emitted=emitted, prefilled=prefilled, seconds=seconds
        )

    def snapshot(self) -> dict[str, float | int | str]:
        self._admission.check_memory_pressure()
        prefill_tok_s = 0.0
        if self._sizer.token_s:
            prefill_tok_s = 1.0 / self._sizer.token_s
        parts: dict[str, float | int | str] = {
            **self.metrics.snapshot(self.clock()),
            **self.speculator.snapshot(),
            **self.guard.snapshot(),
            "waiting": len(self.jobs.waiting),
            "running": len(self.jobs.running),
            **self.pool.snapshot(),
            **self.sender.snapshot(),
            **self._conductor.snapshot(),
            **self._turns.snapshot(),
        }
        parts |= {
            "kv_cells": self.backend.info.n_ctx,
            "kv_cells_free": self.backend.cells_free(),
            "prefill_chunk": self._sizer.chunk,
            "prefill_tok_s": prefill_tok_s,
            "power_share": self.settings.power,
            "decode_threads_most": self._throttle.threads,
        }
        if self._media is not None:
            parts |= self._media.encoder.snapshot()
        return parts

    def check_integrity(self) -> None:
        """Check that free + held cells equal the capacity, that the cache trees are consistent, and
        that each running request has a sequence."""
        for tree in self.pool.kv.trees:
            tree.check_integrity()
        self.backend.check_integrity()
        assert all(j.sequence is not None for j in self.jobs.running.values()), (
            "a running request has no sequence"
        )
