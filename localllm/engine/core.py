"""The engine's loop: requests in, a step, events out. One thread owns it, and with it the backend.

    submit → waiting → admitted (longest known prefix restored) → prefill in chunks → decode → finished

`step()` is the whole architecture: admit who fits, plan one sweep (scheduler), run it (backend), advance every job by
what came out. Between steps one piece of a finished conversation's KV goes to the prefix cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from localllm.engine.admission import Admission
from localllm.engine.advancing import Advance
from localllm.engine.disk_tier import DiskTier
from localllm.engine.job import Job
from localllm.engine.jobs import Jobs
from localllm.engine.loop_guard import LoopGuard
from localllm.engine.memory_guard import Available, MemoryGuard, SystemMemory, headroom_bytes
from localllm.engine.memory_policy import MemoryPolicy
from localllm.engine.messages import Event, Failure, Queued, Request
from localllm.engine.metrics import Metrics
from localllm.engine.prefix_cache import PrefixCache
from localllm.engine.sampling import Bounds, Constraint, Sampler
from localllm.engine.scheduler import LONE_STEP_S, ChunkSizer, Grant, Limits, Want, plan_step
from localllm.engine.sequence_pool import SequencePool
from localllm.engine.sliced_prefill import prefill_policy
from localllm.engine.speculation.draft_model import DraftModel
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.text import TextStream
from localllm.engine.thought_limit import ThoughtLimit
from localllm_backends.contract import Backend, BackendFailure, NoCellsError, StepResult

MakeConstraint = Callable[[tuple[str, str]], Constraint]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`queue_limit` requests may wait; `cache_bytes` of exported prefixes are kept in memory, and `disk_bytes` of them
    under `disk_dir` (None: none). `draft`: off, ngram, or auto (every drafter at hand). `headroom_bytes` of the system's
    memory are left to others (None: by the machine's size; 0: no guard); `planned_bytes` of it are what loading takes
    (0: unknown), which whoever loads has checked. `sliced_prefill_tokens`: prompts with more than that to read are read in slices
    while others decode, where the backend can (0: never)."""

    queue_limit: int = 64
    cache_bytes: int = 2**30
    disk_dir: str | None = None
    disk_bytes: int = 8 * 10**9
    draft: str = "off"
    headroom_bytes: int | None = None
    planned_bytes: int = 0
    sliced_prefill_tokens: int = 512
    make_constraint: MakeConstraint | None = None


@dataclass
class Engine:
    """Serves many requests over one backend. Not thread-safe on purpose: its owner calls everything. `available` says
    how many bytes of memory can be taken now (None: asked of the system)."""

    backend: Backend
    settings: EngineSettings = field(default_factory=EngineSettings)
    clock: Callable[[], float] = time.monotonic
    draft_backend: Backend | None = None
    available: Available | None = None

    def __post_init__(self) -> None:
        cache = PrefixCache(whole=not self.backend.capabilities.segments, capacity_bytes=self.settings.cache_bytes)
        self._disk = self._open_disk(cache)
        self.pool = SequencePool(self.backend, cache, self._disk)
        self.metrics = Metrics(self.clock())
        self.guard = self._make_guard()
        model = DraftModel(self.draft_backend, self.clock) if self.draft_backend is not None else None
        self.speculator = Speculator(self.backend, self.settings.draft, model, self.clock)
        self._sizer = ChunkSizer(self.backend.info.n_batch)
        self.pool.prefill_tok_s = lambda: self._sizer.prefill_tok_s
        self._last_step_s = 0.0
        self._prefill = prefill_policy(self.backend, self.settings.sliced_prefill_tokens, self.metrics, self.clock)
        self.jobs = Jobs(self.pool, self.speculator, self._prefill, self.metrics, self.clock)
        self._memory = MemoryPolicy(self.guard, self.jobs, self.backend, self.settings.cache_bytes)
        self._admission = Admission(self.backend, self.jobs, self._memory)
        self._advance = Advance(self.backend, self.jobs)

    def _open_disk(self, cache: PrefixCache) -> DiskTier | None:
        if self.settings.disk_dir is None or self.settings.disk_bytes <= 0:
            return None
        info = self.backend.info
        kind = f"{info.fingerprint}-{info.kv_type_k}-{info.kv_type_v}-{'whole' if cache.whole else 'parts'}"
        # What wrote KV is part of what it means: another build may compute, rotate or lay it out in another way.
        identity = f"{kind}-{hashlib.blake2b(info.kv_meaning.encode(), digest_size=8).hexdigest()}"
        disk = DiskTier(Path(self.settings.disk_dir) / identity, identity, self.settings.disk_bytes)
        disk.open(cache)
        disk.sweep(kind)
        return disk

    def _make_guard(self) -> MemoryGuard:
        system, headroom = SystemMemory(), self.settings.headroom_bytes
        if headroom is None:
            headroom = headroom_bytes(system.total_bytes)
        return MemoryGuard(self.available or system.available_bytes, headroom)

    # --- in ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """True while any request is waiting or running."""
        return bool(self.jobs)

    def submit(self, request: Request, prompt: list[int]) -> list[Event]:
        """Take a request whose prompt is tokenised. Returns its first event: Queued, or the Failure that ends it."""
        info = self.backend.info
        if not prompt:
            return [Failure(request.id, "invalid_request", "the prompt is empty")]
        generation = request.generation
        room = info.n_ctx - len(prompt)
        if room < 1:
            said = f"the prompt has {len(prompt)} tokens and the served context is {info.n_ctx}"
            return [Failure(request.id, "context_length_exceeded", said)]
        if generation.max_tokens is not None and generation.max_tokens > room:
            said = (
                f"the prompt has {len(prompt)} tokens and max_tokens asks for {generation.max_tokens} more; "
                f"the served context is {info.n_ctx}"
            )
            return [Failure(request.id, "context_length_exceeded", said)]
        if len(self.jobs.waiting) >= self.settings.queue_limit:
            return [Failure(request.id, "server_busy", f"{len(self.jobs.waiting)} requests are waiting already")]
        constraint = None
        if request.grammar is not None:
            if self.settings.make_constraint is None:
                return [
                    Failure(request.id, "unsupported_parameter", "this engine was built without constrained output")
                ]
            try:
                constraint = self.settings.make_constraint(request.grammar)
            except Exception as e:
                return [Failure(request.id, "unsupported_parameter", f"the constraint can't be enforced: {e}")]
        job = self._job(request, prompt, constraint, room)
        self.jobs.waiting[job.id] = job
        self.metrics.requests += 1
        return [Queued(job.id, len(self.jobs.waiting) - 1 + len(self.jobs.running))]

    def _job(self, request: Request, prompt: list[int], constraint: Constraint | None, room: int) -> Job:
        """The request as the engine works on it; `room` tokens fit behind its prompt."""
        generation, backend = request.generation, self.backend
        spell = partial(backend.token_bytes, special=True)
        thought = None
        if request.thinking is not None:
            thought = ThoughtLimit(request.thinking, len(prompt), backend.tokenize, spell)
        bounds = Bounds(
            open_until=len(prompt) + generation.min_tokens if generation.min_tokens else 0,
            ends=tuple({t for t in (*backend.info.eog_tokens, *generation.stop_token_ids) if t < backend.info.n_vocab}),
            thought=thought,
            text=spell,
        )
        return Job(
            request=request,
            tokens=list(prompt),
            n_prompt=len(prompt),
            max_tokens=room if generation.max_tokens is None else generation.max_tokens,
            sampler=Sampler(generation.sampling, constraint, bounds),
            text=TextStream(partial(backend.token_bytes, special=request.render_control), generation.stop),
            submitted_s=self.clock(),
            predicted=backend.tokenize(generation.prediction, special=False) if generation.prediction else [],
            loop_guard=LoopGuard(generation.loops) if generation.loops is not None else None,
        )

    def cancel(self, request_id: str) -> list[Event]:
        """End a request now; its KV so far stays reusable. Unknown ids are ignored (it may just have finished)."""
        job = self.jobs.find(request_id)
        if job is None:
            return []
        self.metrics.cancelled += 1
        self.jobs.finish(job, "cancelled")
        return self.jobs.drain()

    # --- the loop ------------------------------------------------------------------------------------------------

    def step(self, tell: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """Admit, plan, run one sweep, advance. Returns what happened, or `tell`s it before the housekeeping that can be
        done while somebody else reads it, and returns the rest."""
        self._wake(busy=True)
        self._admission.admit()
        self._admission.restore()
        self._slice()
        self.speculator.propose(list(self.jobs.running.values()), hurry=self._prefill.busy)
        grants = self._plan()
        if grants and not self._sweep(grants, tell):
            return self.jobs.drain()
        self.jobs.expire()
        self.pool.tick(busy=self.has_work)
        self.speculator.tick(busy=True)
        return self.jobs.drain()

    def _sweep(self, grants: list[Grant], tell: Callable[[list[Event]], None] | None) -> bool:
        """One sweep over the weights, and what comes of it; False if it could not be made."""
        started, generated = self.clock(), self.metrics.generated_tokens
        result = self._run(grants)
        if result is None:
            return False
        first = self._advance.advance(grants, result)
        self._last_step_s = self.clock() - started
        if tell is not None:
            tell(self.jobs.drain())
        self._observe(grants, self._last_step_s, first, self.metrics.generated_tokens - generated)
        return True

    def _run(self, grants: list[Grant]) -> StepResult | None:
        try:
            return self.backend.step([self._advance.chunk(g) for g in grants])
        except NoCellsError:
            self._admission.relieve()
        except BackendFailure as e:
            # Everything in the step is lost, and says so.
            for job in list(self.jobs.running.values()):
                sequence = self.jobs.fail(job, Failure(job.id, "backend_error", str(e)))
                if sequence is not None:
                    self.backend.drop(sequence)
        return None

    def idle(self) -> bool:
        """Housekeeping between requests; True while there is more of it that needs no waiting."""
        self._wake(busy=False)
        # One thing at a time, so that a new request waits for no more than that.
        return self.pool.tick(busy=False) or self.speculator.tick(busy=False)

    @property
    def awaits_disk(self) -> bool:
        """True while housekeeping can go on only once something is written: `idle` is worth calling again soon."""
        return self.pool.waiting

    def _wake(self, *, busy: bool) -> None:
        self._memory.mind()
        if self._disk is not None:
            self._disk.working(busy)

    def close(self) -> None:
        """Finish exporting what is resident, write it, and free the backend."""
        self._prefill.close()
        self.pool.finish()
        if self._disk is not None:
            self._disk.close()
        self.speculator.close()
        self.backend.close()

    # --- one step ------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Grant]:
        now = self.clock()
        wants = [
            Want(
                key=job.id,
                prefill=job.until_checkpoint if job.prefilling else 0,
                decode=0 if job.prefilling else 1 + len(job.draft),
                waited_s=now - job.submitted_s,
            )
            for job in self.jobs.running.values()
            if job.steppable and not self._prefill.keeps_out(job)
        ]
        info = self.backend.info
        return plan_step(wants, Limits(info.n_batch, info.n_outputs, self._sizer.chunk, self._sizer.lone))

    def _slice(self) -> None:
        """What the backend's prefill policy does between the steps."""
        now = self._prefill.advance(self.jobs.running.values(), self._slice_s, self.guard.spare_bytes)
        if now is not None:
            self.jobs.progress(*now)

    def _slice_s(self) -> float:
        """How long others wait for their next step at most, in seconds."""
        return self._sizer.slice_s(self._last_step_s) if self.jobs.decoding else LONE_STEP_S

    # --- measuring -----------------------------------------------------------------------------------------------

    def _observe(self, grants: list[Grant], seconds: float, first_outputs: int, emitted: int) -> None:
        prefilled = sum(g.n_tokens for g in grants if g.prefill)
        decoding = [g for g in grants if not g.prefill]
        rows = sum(g.n_tokens for g in decoding)
        if decoding and not prefilled:
            self.speculator.observe(sequences=len(decoding), rows=rows, tokens=emitted, seconds=seconds)
        if rows == len(decoding) and not self._prefill.busy:
            # What a chunk or slice beside decoding may cost is measured in plain decode steps. After a slice their data
            # has left the caches, and they take half as long again.
            self._sizer.observe(decoded=len(decoding), prefilled=prefilled, seconds=seconds)
        self.metrics.step(
            decoded=len(decoding), emitted=emitted, prefilled=prefilled, seconds=seconds, first=first_outputs
        )

    def snapshot(self) -> dict[str, float | int | str]:
        """The metrics now, as plain values."""
        self._memory.mind()
        cache = self.pool.cache
        return {
            **self.metrics.snapshot(self.clock()),
            **self.speculator.snapshot(),
            **self.guard.snapshot(),
            "waiting": len(self.jobs.waiting),
            "running": len(self.jobs.running),
            "residents": self.pool.residents,
            "kv_cells": self.backend.info.n_ctx,
            "kv_cells_free": self.backend.cells_free(),
            "cache_bytes": cache.held_bytes,
            "cache_capacity_bytes": cache.capacity_bytes,
            "cache_evicted_tokens": cache.evicted_tokens,
            "restored_tokens": self.pool.restored_tokens,
            "lost_blocks": self.pool.lost_blocks,
            "prefill_chunk": self._sizer.chunk,
            "disk_written_bytes": self._disk.written_bytes if self._disk else 0,
            "disk_read_blocks": self._disk.read_blocks if self._disk else 0,
            "disk_bad_blocks": self._disk.bad_blocks if self._disk else 0,
        }

    def check_integrity(self) -> None:
        """Cells: free + held == capacity; cache: its own laws; no sequence is held by nobody."""
        self.pool.cache.check_integrity()
        self.backend.check_integrity()
        held = sum(1 for j in self.jobs.running.values() if j.sequence is not None)
        assert held == len(self.jobs.running), "a running request without a sequence"
