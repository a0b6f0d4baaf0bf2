"""The engine's loop: requests in, a step, events out. One thread owns it, and with it the backend.

    submit → waiting → admitted (longest known prefix restored) → prefill in chunks → decode →
    finished

`step()` is the whole architecture: admit who fits, plan one sweep (scheduler), run it (backend),
advance every job by what came out. Between steps one piece of a finished conversation's KV goes to
the prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from localllm.engine import EngineSettings
from localllm.engine.admission import Admission
from localllm.engine.cache.disk import tier_of
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.store import KvStore
from localllm.engine.contention import ThreadThrottle, of_this_process
from localllm.engine.messages import Event, Failure, Request
from localllm.engine.metrics import DecodeSpeedTracker, Metrics
from localllm.engine.outputs import OutputProcessor
from localllm.engine.prefill_slices import PrefillInterrupt, SlicedPrefill
from localllm.engine.request import RunningRequest, running_request
from localllm.engine.request_table import RequestTable
from localllm.engine.sampling.grammar import BackgroundCompiler, GrammarCompiler
from localllm.engine.scheduler import (
    Grant,
    Limits,
    Shares,
    plan_step,
)
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.step_costs import PROMPT_STEP_S, SINGLE_STEP_S, ChunkSizer
from localllm.engine.tokens import Placed
from localllm.engine.vision import ImageSteps, image_steps
from localllm.limited_child import Stages
from localllm.memory.guard import Available, guard_of
from localllm_backends.contract import (
    Backend,
    BackendFailure,
    InterruptedStepError,
    NoCellsError,
    StepResult,
)

# Where requests only wait for a grammar, an image or the disk, new messages are looked for this
# often, in seconds.
WAIT_S = 0.01
# Housekeeping begins so long after the last step, in seconds, where a piece of it takes long
# (`Engine.idle_wait_s`).
IDLE_GRACE_S = 0.05
# With nothing to do: how often an idle engine looks whether others need its memory, and how often
# where housekeeping goes on once something is written, in seconds.
MEMORY_LOOK_S = 2.0
WRITING_S = 0.02


@dataclass
class Engine:
    """Serves many requests over one backend. Not thread-safe on purpose: its owner calls
    everything. `available` says how many bytes of memory can be taken now (None: asked of the
    system)."""

    backend: Backend
    settings: EngineSettings = field(default_factory=EngineSettings)
    clock: Callable[[], float] = time.monotonic
    draft_backend: Backend | None = None
    available: Available | None = None

    def __post_init__(self) -> None:
        wanted = self.settings
        kv = KvStore(self.backend, wanted.cache_bytes, tier_of(self.backend, wanted))
        self.pool = SequencePool(self.backend, kv)
        self.metrics = Metrics(self.clock())
        self.guard = guard_of(self.available, wanted.headroom_bytes)
        others = of_this_process()
        able = self.backend.capabilities
        n_batch = self.backend.info.n_batch
        self._sizer = ChunkSizer(n_batch, on_device=able.kv_on_device, gap_s=wanted.gap_s)
        self.speculator = Speculator(
            self.backend, self.draft_backend, wanted.draft, self.clock, others, self._sizer
        )
        kv.speed = self._sizer
        self._last_step_s = 0.0
        self._worked_s = self._step_began_s = self._rests_until_s = self.clock()
        self._stalled = False
        self._housekeeping = True
        # Where a piece of housekeeping is a state it takes up to 25 ms (gemma-3-270m, in memory
        # nobody has touched yet), as long as a request that is all cached, and agents send the next
        # one within milliseconds. KV in pieces takes one: the sooner it is out, the more often the
        # same prompt again is computed over the same cells, and so to the last bit.
        self._takes_grace = kv.states is not None and not kv.snapshots
        # Nothing that is known waits for a rest to be over.
        self._overlaps = able.asynchronous and wanted.power >= 1.0
        self._observed: tuple[list[Grant], float, int] | None = None
        self._interrupt = PrefillInterrupt(self.backend)
        shares = Shares()
        least = wanted.sliced_prefill_tokens
        self.prefill = SlicedPrefill(self.backend, least, self.metrics, self.clock, shares=shares)
        self.jobs = RequestTable(
            self.pool, self.speculator, self.prefill, self.metrics, self.clock, shares=shares
        )
        self.pool.running = self.jobs.running
        self._compiler = BackgroundCompiler(
            wanted.make_matcher or GrammarCompiler(self.backend),
            wanted.grammar_trials or Stages([]),
            kv.disk.reads.news,
        )
        kept = wanted.disk_dir if wanted.disk_bytes > 0 else None
        self._images = image_steps(self.backend, kv.disk.reads.news, kept)
        self._admission = Admission(self.backend, self.jobs, self.guard, wanted.cache_bytes)
        self._outputs = OutputProcessor(self.backend, self.jobs, self._compiler.start, self._images)
        self.pace = DecodeSpeedTracker(others)
        computing = [
            b
            for b in (self.backend, self.draft_backend)
            if b is not None and b.capabilities.threaded
        ]
        self._throttle = ThreadThrottle(computing if self.settings.yields_threads else [], others)

    # --- in ---------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.jobs)

    def submit(
        self, request: Request, prompt: list[int], images: tuple[Placed, ...] = ()
    ) -> list[Event]:
        """Take a request whose prompt is tokenised, with its images. Returns its first event:
        Queued, or the Failure that ends it. One with a grammar has its first event from a step,
        once that is compiled."""
        info = self.backend.info
        if not prompt:
            return [Failure(request.id, "invalid_request", "the prompt is empty")]
        generation = request.generation
        if len(prompt) >= info.n_ctx:
            said = f"the prompt has {len(prompt)} tokens and the served context is {info.n_ctx}"
            return [
                Failure(
                    request.id, "context_length_exceeded", said, counts=(len(prompt), info.n_ctx)
                )
            ]
        unreadable = ""
        if self._images is not None:
            unreadable = self._images.unreadable(images, info.n_batch)
        if unreadable:
            return [Failure(request.id, "invalid_request", unreadable)]
        before = sum(job.sharer[0] == generation.tenant for job in self.jobs.waiting.values())
        if before >= self.settings.queue_limit:
            return [Failure(request.id, "server_busy", f"{before} requests are waiting already")]
        job = running_request(request, prompt, images, self.backend, self.clock())
        self._stalled = False
        self._housekeeping = True
        self.jobs.enter(job)
        constraint = request.constraint
        if constraint is not None and constraint.grammar is not None:
            job.compilation = self._compiler.start(constraint.grammar, constraint.beginning)
            return []
        if constraint is not None and constraint.triggers:
            # The grammar of the first call, which is likely ready when that comes.
            first = next(iter(constraint.triggers.values()))
            job.expected = self._compiler.start(first.grammar)
        return [self.jobs.queued(job)]

    def cancel(self, request_id: str) -> list[Event]:
        """End a request now; its KV so far stays reusable. Unknown ids are ignored (it may just
        have finished)."""
        job = self.jobs.find(request_id)
        self._interrupt.left(request_id)
        self._stalled = False
        self._housekeeping = True
        if job is None:
            return []
        self.metrics.cancelled += 1
        self._outputs.send_text()
        self.jobs.finish(job, "cancelled")
        return self.jobs.drain()

    def interrupt(self, request_id: str) -> None:
        """Its cancel is on the way: a step that reads this request's prompt and nothing else need
        not come to its end. From any thread, and followed by `cancel`."""
        self._interrupt.leave(request_id)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self, tell: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """One sweep over the weights for everybody who can use it. Returns what happened, or
        `tell`s it as soon as it is known, before what can be done while somebody reads it, and
        returns the rest."""
        began_s = self.clock()
        self._receive()
        self._admit()
        grants = self._schedule()
        result = self._forward(grants)
        if self._overlaps:
            self._afterwards(tell)
        if self._process(grants, result) and not (self._overlaps and self.has_work):
            self._afterwards(tell)
        now = self.clock()
        # a step that took longer than any is planned was stopped, and computed nothing meanwhile
        self._rests_until_s = now + min(now - began_s, SINGLE_STEP_S) * (
            1.0 / self.settings.power - 1.0
        )
        return self.jobs.drain()

    @property
    def can_step(self) -> bool:
        """True while a step has something to do; where requests only wait for a grammar, an image
        or the disk, `idle` waits."""
        return self.has_work and not self._stalled

    @property
    def idle_wait_s(self) -> float:
        """How long its owner may wait for a message before it calls `step` or `idle` again, in
        seconds."""
        if self.has_work:
            return max(0.0, self._rests_until_s - self.clock())
        if self._housekeeping:
            if self._takes_grace:
                return max(0.0, IDLE_GRACE_S - (self.clock() - self._worked_s))
            return 0.0
        if self.pool.waiting:
            return WRITING_S
        return MEMORY_LOOK_S

    def idle(self) -> bool:
        """What is to be done while no step can be made: wait for what running requests wait for, or
        else one piece of housekeeping. True while there is more of it that needs no waiting."""
        if self.has_work:
            if self._stalled:
                self.pool.kv.disk.reads.wait(WAIT_S)
            self._stalled = False
            return True
        self._admission.look_at_memory()
        self.pool.kv.disk.working(False)
        rested_s = self.clock() - self._worked_s
        # One piece at a time, so that a new request waits for no more than that; one that fails is
        # not tried again at once.
        self._housekeeping = False
        self._housekeeping = (
            self.pool.tick(busy=False)
            or self.backend.idle_work(self.guard.free_bytes)
            or self.speculator.tick(busy=False, rested_s=rested_s)
        )
        return self._housekeeping

    def _receive(self) -> None:
        """Look at memory, and take in those whose grammar is compiled by now."""
        self._admission.look_at_memory()
        self.pool.kv.disk.working(True)
        self._worked_s = self.clock()
        self._housekeeping = True
        self.jobs.take_compiled()

    def _admit(self) -> None:
        """Let in who fits; idle sequences leave the context; cached prefixes come back."""
        self._admission.admit()
        self._admission.evict_idle()
        self._admission.restore()

    def _schedule(self) -> list[Grant]:
        """What goes into this step: every decoding sequence's next token with its draft, and chunks
        of prompts, but for what the backend reads of them between the steps."""
        before = self.metrics.prefilled_tokens
        sliced = self.prefill.advance(
            self.jobs.running.values(),
            self._slice_s,
            self.guard.free_bytes,
        )
        if sliced is not None:
            self.jobs.shares.charge(sliced[0].sharer, self.metrics.prefilled_tokens - before)
            self.jobs.progress(*sliced)
        self.speculator.propose(
            list(self.jobs.running.values()), hurry=self.prefill.job is not None
        )
        return self._plan()

    def _slice_s(self) -> float:
        """How long others wait for their next step at most while a slice is read, in seconds."""
        if self.jobs.decoding:
            return self._sizer.slice_s(self._last_step_s)
        return PROMPT_STEP_S

    def _forward(self, grants: list[Grant]) -> StepResult | None:
        """One sweep over the weights; None where there is nothing to compute, or it could not be
        made."""
        if not grants:
            return None
        self._step_began_s = self.clock()
        result = None
        try:
            with self._interrupt.running(grants):
                result = self.backend.step([self._outputs.chunk(g) for g in grants])
        except InterruptedStepError:
            pass
        except NoCellsError:
            self._admission.relieve()
        except BackendFailure as e:
            self._outputs.lose_running(e)
        for grant in grants:
            job = self.jobs.running.get(grant.key)
            if job is not None:
                self.jobs.shares.charge(job.sharer, grant.n_tokens)
        return result

    def _process(self, grants: list[Grant], result: StepResult | None) -> bool:
        """Everybody's next tokens from what came out; False where there was a step and nothing
        came."""
        if grants:
            if result is None:
                return False
            generated = self.metrics.generated_tokens
            try:
                self._outputs.advance(grants, result)
            except BackendFailure as e:
                self._outputs.lose_running(e)
                return False
            self._last_step_s = self.clock() - self._step_began_s
            emitted = self.metrics.generated_tokens - generated
            self._observed = grants, self._last_step_s, emitted
        awaits = self._admission.awaits_disk or (self._images is not None and self._images.waiting)
        self._stalled = (
            not grants and self.prefill.job is None and (awaits or self.jobs.compiling_alone)
        )
        self.jobs.expire()
        return True

    def _afterwards(self, tell: Callable[[list[Event]], None] | None) -> None:
        """What need not be done before the next step: text, events, measurements and housekeeping.
        While it is computed where the backend only takes the order, else at once."""
        self._outputs.look_ahead()
        self._outputs.send_text()
        if tell is not None and self.jobs.events:
            tell(self.jobs.drain())
        if self._observed is not None:
            self._observe(*self._observed)
            self._observed = None
        if self.has_work or not self._takes_grace:
            self.pool.tick(busy=self.has_work, live=len(self.jobs.running))
        self.speculator.tick(busy=True)
        self._worked_s = self.clock()

    def close(self) -> None:
        """Finish exporting what is resident, write it, and free the backend."""
        self.prefill.close()
        self._compiler.close()
        if self._images is not None:
            self._images.encoder.close()
        self.pool.finish()
        self.pool.kv.disk.close()
        self.speculator.close()
        self.backend.close()

    # --- one step ---------------------------------------------------------------------------------

    def _plan(self) -> list[Grant]:
        now = self.clock()
        info = self.backend.info
        ready = [
            j for j in self.jobs.running.values() if j.steppable and not self.prefill.excludes(j)
        ]
        prompt_only = self._prompt_only_tokens()
        if self._images is not None:
            image = self._plan_image(self._images, ready, prompt_only)
            if image is not None:
                return [image]
            ready = [
                j for j in ready if j.id in self.jobs.running and not (j.prefilling and j.image)
            ]
        if len(ready) <= info.n_outputs and all(j.decodes_plainly for j in ready):
            return [Grant(j.id, 1, prefill=False) for j in ready]
        return plan_step(
            [self.jobs.want(job, now) for job in ready],
            Limits(info.n_batch, info.n_outputs, self._sizer.chunk, prompt_only),
        )

    def _prompt_only_tokens(self) -> int:
        """Prefill tokens of a step in which nobody decodes: more where one request is all there is,
        and can be interrupted. Where nobody shares, as many whatever they cost: who asks again is
        told the same, to the last bit."""
        jobs = [*self.jobs.waiting.values(), *self.jobs.running.values()]
        # A rest is as long as its step asks for.
        if (
            len(jobs) == 1
            and self.backend.capabilities.interruptible
            and self.settings.power >= 1.0
        ):
            step_s = SINGLE_STEP_S
        else:
            step_s = PROMPT_STEP_S
        return self._sizer.prompt_tokens(step_s if any(job.shares for job in jobs) else 0.0)

    def _plan_image(
        self, images: ImageSteps, ready: list[RunningRequest], prompt_only: int
    ) -> Grant | None:
        """The image that is read in this step; those that can't be read end their requests."""
        image = images.plan(
            ready,
            min(
                self.backend.info.n_batch, self._sizer.chunk if self.jobs.decoding else prompt_only
            ),
        )
        for job, why in images.failed:
            self.jobs.fail(job, Failure(job.id, "invalid_request", why))
        return image

    # --- measuring --------------------------------------------------------------------------------

    def _observe(self, grants: list[Grant], seconds: float, emitted: int) -> None:
        prefilled = sum(g.n_tokens for g in grants if g.prefill)
        decoding = [g for g in grants if not g.prefill]
        rows = sum(g.n_tokens for g in decoding)
        if decoding and not prefilled:
            self.speculator.observe(
                sequences=len(decoding), rows=rows, tokens=emitted, seconds=seconds
            )
        if rows == len(decoding) and self.prefill.job is None:
            # Beside slices of a prompt the steps' data have left the caches, and they take longer.
            self._sizer.observe(
                decoded=len(decoding),
                prefilled=prefilled,
                seconds=seconds,
                waited=emitted > 0 or not self._overlaps,
            )
            # One request's plain steps say how fast this start is.
            alone = len(grants) == 1 and bool(decoding)
            job = None
            if alone:
                job = self.jobs.running.get(grants[0].key)
            if job is not None and not job.sampler.constrained:
                self.pace.observe(len(job.tokens), seconds)
        self._throttle.stepped(seconds)
        self.metrics.step(
            decoded=len(decoding), emitted=emitted, prefilled=prefilled, seconds=seconds
        )

    def snapshot(self) -> dict[str, float | int | str]:
        self._admission.look_at_memory()
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
        }
        parts |= {
            "kv_cells": self.backend.info.n_ctx,
            "kv_cells_free": self.backend.cells_free(),
            "prefill_chunk": self._sizer.chunk,
            "prefill_tok_s": prefill_tok_s,
            "power_share": self.settings.power,
            "decode_threads_most": self._throttle.threads,
        }
        if self._images is not None:
            parts |= self._images.encoder.snapshot()
        return parts

    def check_integrity(self) -> None:
        """Cells: free + held == capacity; cache: its own laws; no sequence is held by nobody."""
        for tree in self.pool.kv.trees:
            tree.check_integrity()
        self.backend.check_integrity()
        assert all(j.sequence is not None for j in self.jobs.running.values()), (
            "a running request without a sequence"
        )
