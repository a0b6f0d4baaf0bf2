"""The engine's loop: requests in, a step, events out. One thread owns it, and with it the backend.

    submit → waiting → admitted (longest known prefix restored) → prefill in chunks → decode → finished

`step()` is the whole architecture: admit who fits, plan one sweep (scheduler), run it (backend), advance every job by
what came out. Between steps one piece of a finished conversation's KV goes to the prefix cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from localllm.engine.admission import checkpoints, miss_reason, prefix_in_progress, recomputed
from localllm.engine.asides import Asides
from localllm.engine.disk_tier import DiskTier
from localllm.engine.job import Job
from localllm.engine.memory_guard import Available, MemoryGuard, SystemMemory, headroom_bytes, return_to_system
from localllm.engine.messages import Event, Failure, Finish, FinishReason, Prefill, Queued, Request, Text, TokenLogprob
from localllm.engine.metrics import Metrics
from localllm.engine.prefix_cache import PrefixCache, as_tokens
from localllm.engine.residency import NOWHERE, Residency, Source
from localllm.engine.sampling import Constraint, Row, Sampler, best_ids, log_softmax
from localllm.engine.scheduler import LONE_STEP_S, ChunkSizer, Grant, Limits, Want, admission_order, plan_step
from localllm.engine.seen import SeenLines
from localllm.engine.speculation.draft_model import DraftModel
from localllm.engine.speculation.speculator import Speculator
from localllm.engine.text import TextStream
from localllm_backends.contract import Backend, BackendFailure, Chunk, NoCellsError, StepResult

# Admission keeps this many cells for the answer; an answer that grows past them may park a younger request.
_ANSWER_RESERVE_TOKENS = 128
_PREFILL_EVENT_S = 0.25

MakeConstraint = Callable[[tuple[str, str]], Constraint]


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`queue_limit` requests may wait; `cache_bytes` of exported prefixes are kept in memory, and `disk_bytes` of them
    under `disk_dir` (None: none). `draft`: off, ngram, or auto (every drafter at hand). `headroom_bytes` of the system's
    memory are left to others (None: by the machine's size; 0: no guard); `planned_bytes` of it are what loading takes
    (0: unknown), which whoever loads has checked. `aside_tokens`: prompts with more than that to read are read aside
    while others decode, where the backend can (0: never)."""

    queue_limit: int = 64
    cache_bytes: int = 2**30
    disk_dir: str | None = None
    disk_bytes: int = 8 * 10**9
    draft: str = "off"
    headroom_bytes: int | None = None
    planned_bytes: int = 0
    aside_tokens: int = 512
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
        info = self.backend.info
        cache = PrefixCache(whole=not self.backend.capabilities.segments, capacity_bytes=self.settings.cache_bytes)
        self._disk = self._open_disk(cache)
        self.residency = Residency(self.backend, cache, self._disk)
        self._seen = SeenLines()
        self.metrics = Metrics(self.clock())
        self.guard = self._make_guard()
        # Where the KV is all there after loading, a request takes no more memory.
        loaded = self.backend.memory()
        self._kv_at_load = loaded.kv_bytes + loaded.recurrent_bytes > 0
        model = DraftModel(self.draft_backend, self.clock) if self.draft_backend is not None else None
        self.speculator = Speculator(self.backend, self.settings.draft, model, self.clock)
        self._waiting: dict[str, Job] = {}
        self._running: dict[str, Job] = {}
        self._sizer = ChunkSizer(info.n_batch)
        self._last_step_s = 0.0
        self._asides = Asides(self.backend, self.settings.aside_tokens)
        self._events: list[Event] = []
        self._eog = frozenset(info.eog_tokens)
        self._progress_s: dict[str, float] = {}
        self._parked_at_step = -1
        self.residency.prefill_tok_s = lambda: self._sizer.prefill_tok_s

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
        return bool(self._waiting or self._running)

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
        if len(self._waiting) >= self.settings.queue_limit:
            return [Failure(request.id, "server_busy", f"{len(self._waiting)} requests are waiting already")]
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
        job = Job(
            request=request,
            tokens=list(prompt),
            n_prompt=len(prompt),
            max_tokens=room if generation.max_tokens is None else generation.max_tokens,
            sampler=Sampler(generation.sampling, constraint),
            text=TextStream(partial(self.backend.token_bytes, special=request.render_control), generation.stop),
            submitted_s=self.clock(),
            predicted=self.backend.tokenize(generation.prediction, special=False) if generation.prediction else [],
        )
        self._waiting[job.id] = job
        self.metrics.requests += 1
        return [Queued(job.id, len(self._waiting) - 1 + len(self._running))]

    def cancel(self, request_id: str) -> list[Event]:
        """End a request now; its KV so far stays reusable. Unknown ids are ignored (it may just have finished)."""
        job = self._waiting.get(request_id) or self._running.get(request_id)
        if job is None:
            return []
        self.metrics.cancelled += 1
        self._finish(job, "cancelled")
        return self._drain()

    # --- the loop ------------------------------------------------------------------------------------------------

    def step(self, tell: Callable[[list[Event]], None] | None = None) -> list[Event]:
        """Admit, plan, run one sweep, advance. Returns what happened, or `tell`s it before the housekeeping that can be
        done while somebody else reads it, and returns the rest."""
        self._mind_memory()
        if self._disk is not None:
            self._disk.working(True)
        self._admit()
        self._restore()
        self._read_aside()
        self.speculator.propose(list(self._running.values()), hurry=self._asides.job is not None)
        grants = self._plan()
        if grants:
            started = self.clock()
            try:
                result = self.backend.step([self._chunk(g) for g in grants])
            except NoCellsError:
                self._relieve()
                return self._drain()
            except BackendFailure as e:
                self._fail_all(str(e))
                return self._drain()
            generated = self.metrics.generated_tokens
            first_outputs = self._advance(grants, result)
            emitted = self.metrics.generated_tokens - generated
            seconds = self._last_step_s = self.clock() - started
            if tell is not None:
                tell(self._drain())
            self._observe(grants, seconds, first_outputs, emitted)
        self._expire()
        self.residency.tick(busy=self.has_work)
        self.speculator.tick(busy=True)
        return self._drain()

    @property
    def awaits_disk(self) -> bool:
        """True while housekeeping can go on only once something is written: `idle` is worth calling again soon."""
        return self.residency.waiting

    def idle(self) -> bool:
        """Housekeeping between requests; True while there is more of it that needs no waiting."""
        self._mind_memory()
        if self._disk is not None:
            self._disk.working(False)
        return self.residency.tick(busy=False) or self.speculator.tick(busy=False)

    def close(self) -> None:
        """Finish exporting what is resident, write it, and free the backend."""
        if self._asides.job is not None:
            self._asides.forget(self._asides.job)
        self.residency.finish()
        if self._disk is not None:
            self._disk.close()
        self.speculator.close()
        self.backend.close()

    def _drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- memory --------------------------------------------------------------------------------------------------

    def _mind_memory(self, *, give_back_all: bool = False) -> None:
        """Look at what is available now and then; under pressure the prefix cache shrinks and stops growing."""
        if not self.guard.look(self.clock(), force=give_back_all):
            return
        cache, most = self.residency.cache, self.settings.cache_bytes
        if self.guard.pressure != "none" and cache.shrink(
            cache.held_bytes if give_back_all else self.guard.missing_bytes
        ):
            return_to_system()
            self.guard.look(self.clock(), force=True)
        cache.resize(most if self.guard.pressure == "none" else min(most, cache.held_bytes))

    def _may_run(self) -> int:
        """How many requests may run together now. When memory is nearly gone nobody joins others; a request alone is
        served if its KV is there already, or can be had for all that we can give back."""
        if self.guard.pressure != "hold":
            return self.backend.info.n_seq_max
        if self._running or self._kv_at_load:
            return 1
        self.residency.make_room(self.backend.info.n_ctx, live=1)
        self._mind_memory(give_back_all=True)
        if self.guard.pressure == "hold":
            # One that was parked in mid-answer is not refused: it has begun.
            for job in [j for j in self._waiting.values() if not j.admissions]:
                self._remove(job)
                hint = "close other programs, then send the request again"
                self._events.append(Failure(job.id, "server_busy", self.guard.why(), hint))
        return 1

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        if not self._waiting:
            return
        if self._running and self.metrics.steps == self._parked_at_step:
            # Those that one was parked for go on first: joining them again at once would end in parking again.
            return
        most = self._may_run()
        while self._waiting and len(self._running) < most:
            now = self.clock()
            sources = {job.id: self._source(job, self._running.values()) for job in self._waiting.values()}
            order = admission_order(
                [(j.id, len(j.tokens) - sources[j.id].length, now - j.submitted_s) for j in self._waiting.values()]
            )
            if not any(self._try_admit(self._waiting[key], sources[key], now) for key in order):
                return

    def _try_admit(self, job: Job, source: Source, now: float) -> bool:
        rewinds = self.backend.capabilities.rewind == "any"
        if rewinds and prefix_in_progress(job, source, self._running.values()):
            return False
        tokens = as_tokens(job.tokens)
        left = job.max_tokens - job.n_generated
        reserve = min(left, _ANSWER_RESERVE_TOKENS)
        need = self.residency.needs_cells(source, min(len(tokens) + reserve, self.backend.info.n_ctx))
        # Besides, everybody's next step must fit, or somebody is parked in it.
        growing = sum(j.pending for j in self._running.values())
        live = len(self._running) + (0 if source.kind == "resident" else 1)
        if not self.residency.make_room(need + growing, live=live, keep=source.resident):
            if self._running:
                return False
            self.residency.make_room(self.backend.info.n_ctx, live=1)
            source = self._source(job, ())
        try:
            taken = self.residency.take(source, tokens)
        except NoCellsError:
            return False
        job.sequence, job.n_kv, job.restoring, job.known = taken.sequence, taken.held, taken.rest, source.known
        del self._waiting[job.id]
        self._running[job.id] = job
        if not job.admissions:
            job.queued_s = now - job.submitted_s
        job.admitted_s = now
        return True

    def _source(self, job: Job, live: Iterable[Job]) -> Source:
        """Where its prefix can come from; a job that does not share takes nothing, and nobody takes from it."""
        if not job.shares:
            return NOWHERE
        return self.residency.lookup(as_tokens(job.tokens), [j for j in live if j.shares])

    def _restore(self) -> None:
        """Import what admitted requests find in the cache: one piece a step while somebody decodes, else all of it."""
        streams = any(not j.prefilling for j in self._running.values())
        imported = False
        for job in self._running.values():
            if job.begun:
                continue
            while job.gap is None and job.restoring is not None and not job.restoring.done:
                if streams and imported:
                    break
                job.restoring.step()
                job.n_kv = job.restoring.held
                imported = True
            if job.restoring is None or job.restoring.done:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        """All of its prefix that can be had is there: now it prefills."""
        taken = job.n_kv if job.restoring is None else job.restoring.imported
        missed = {} if job.restoring is None else job.restoring.missed
        self.residency.restored_tokens += 0 if job.restoring is None else taken
        line = as_tokens(job.tokens)
        if job.admissions:
            self.metrics.recomputed("parked", len(line) - 1 - taken)
        else:
            self.metrics.prompt_tokens += job.n_prompt
            if job.shares:
                job.known = max(job.known, self._seen.known(line[:-1]))
            job.cached = taken
            again = recomputed(job.known, taken, missed, whole=self.residency.cache.whole)
            for reason, n_tokens in again.items():
                self.metrics.recomputed(reason, n_tokens)
            job.miss = miss_reason(job, again, self.backend.is_control)
            self.metrics.cached_tokens += taken
        job.restoring, job.begun = None, True
        job.admissions += 1
        if self.residency.cache.whole and job.shares:
            job.checkpoints = checkpoints(job, self.backend.is_control)
        self._events.append(Prefill(job.id, job.n_kv, job.n_prompt, job.cached))

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
            for job in self._running.values()
            if (job.begun or job.gap is not None) and not self._asides.keeps_out(job)
        ]
        info = self.backend.info
        return plan_step(wants, Limits(info.n_batch, info.n_outputs, self._sizer.chunk, self._sizer.lone))

    def _read_aside(self) -> None:
        """A slice of time for the long prompt that is read beside the streams."""
        job = self._asides.job
        if job is not None:
            streams = any(not j.prefilling for j in self._running.values())
            started = self.clock()
            slice_s = self._sizer.slice_s(self._last_step_s) if streams else LONE_STEP_S
            read = self._asides.run(slice_s, self._running.values())
            self.metrics.aside(read, self.clock() - started)
            if job is self._asides.job:
                self._progress(job, self._asides.n_kv)
                return
        self._asides.begin(self._running.values(), self.guard.spare_bytes)

    def _chunk(self, grant: Grant) -> Chunk:
        job = self._running[grant.key]
        assert job.sequence is not None
        if grant.prefill:
            tokens = job.tokens[job.n_kv : job.n_kv + grant.n_tokens]
            return Chunk(job.sequence, tokens, 1 if job.n_kv + grant.n_tokens == len(job.tokens) else 0)
        job.draft = job.draft[: grant.n_tokens - 1]
        return Chunk(job.sequence, [*job.tokens[job.n_kv :], *job.draft], grant.n_tokens)

    def _advance(self, grants: list[Grant], result: StepResult) -> int:
        first = 0
        for i, grant in enumerate(grants):
            job = self._running[grant.key]
            assert job.sequence is not None
            job.n_kv += grant.n_tokens
            if grant.prefill and job.n_kv < len(job.tokens):
                self._after_chunk(job)
                continue
            first += job.first_token_s is None
            self._accept(job, result, i)
        return first

    def _after_chunk(self, job: Job) -> None:
        assert job.sequence is not None
        if job.restoring is not None:
            job.restoring.computed(job.n_kv)
        if job.n_kv in job.checkpoints:
            self.residency.checkpoint(job.sequence, as_tokens(job.tokens[: job.n_kv]))
        self._progress(job, job.n_kv)

    def _progress(self, job: Job, n_kv: int) -> None:
        now = self.clock()
        if now - self._progress_s.get(job.id, 0.0) >= _PREFILL_EVENT_S:
            self._progress_s[job.id] = now
            self._events.append(Prefill(job.id, min(n_kv, job.n_prompt), job.n_prompt, job.cached))

    def _accept(self, job: Job, result: StepResult, index: int) -> None:
        """Turn the outputs of a job's chunk into tokens; take rejected drafts back out of the KV."""
        draft, drawn_from = job.draft, job.draft_from
        job.draft, job.draft_from = [], None
        greedy = job.sampler.greedy and job.request.generation.logprobs is None
        best = result.argmax(index) if greedy else []
        rows = None if greedy else result.logits(index)
        accepted = 0
        before = len(job.tokens)
        said: list[Text] = []
        finish: FinishReason | None = None
        for i in range(len(draft) + 1):
            if rows is None:
                token = best[i]
            elif drawn_from is not None and i < len(draft):
                token, _ = job.sampler.verify(rows[i], job.tokens, draft[i], drawn_from[i])
            else:
                token = job.sampler.choose(rows[i], job.tokens)
            right = i < len(draft) and token == draft[i]
            accepted += right
            finish = self._emit(job, token, None if rows is None else rows[i], said)
            if finish is not None or not right:
                break
        self._events += said if len(said) < 2 else [_joined(said)]
        # The KV of a drafted token that ended the answer is right too; what lies behind it is not.
        rejected = len(draft) - accepted
        job.accepted_drafts += accepted
        job.rejected_drafts += rejected
        self.speculator.emitted(job, job.tokens[before:], len(draft), accepted)
        if rejected:
            job.n_kv -= rejected
            assert job.sequence is not None
            self.backend.truncate(job.sequence, job.n_kv)
        if finish is not None:
            self._finish(job, finish)

    def _emit(self, job: Job, token: int, row: Row | None, said: list[Text]) -> FinishReason | None:
        """Append one chosen token, and its text to `said`; the reason if it ends the request."""
        now = self.clock()
        if job.first_token_s is None:
            job.first_token_s = now
            job.prefill_s = now - (job.admitted_s or now)
        self.metrics.generated_tokens += 1
        if token in self._eog and not job.request.generation.ignore_eos:
            job.tokens.append(token)
            return "stop"
        text = job.text.push(token)
        logprobs = (
            self._logprobs(job, token, row) if job.request.generation.logprobs is not None and row is not None else ()
        )
        job.tokens.append(token)
        said.append(Text(job.id, text, (token,), logprobs))
        if job.text.stopped_by is not None:
            return "stop"
        if job.sampler.constraint is not None and job.sampler.constraint.finished:
            return "stop"
        if job.n_generated >= job.max_tokens or len(job.tokens) >= self.backend.info.n_ctx:
            return "length"
        return None

    def _logprobs(self, job: Job, token: int, row: Row) -> tuple[TokenLogprob, ...]:
        values = log_softmax(row)

        def text(t: int) -> str:
            return self.backend.token_bytes(t, special=True).decode("utf-8", "replace")

        n = job.request.generation.logprobs or 0
        top: list[int] = best_ids(row, n).tolist() if n else []
        alternatives = tuple((text(t), t, float(values[t])) for t in top)
        return (TokenLogprob(text(token), token, float(values[token]), alternatives),)

    # --- ends ----------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, reason: FinishReason) -> None:
        rest = job.text.flush() if reason != "cancelled" else ""
        if rest:
            self._events.append(Text(job.id, rest))
        if job.text.stopped_by is not None:
            reason = "stop"
        self._remove(job)
        self._events.append(Finish(job.id, reason, job.usage(), job.timings(self.clock()), job.text.stopped_by))

    def _remove(self, job: Job) -> None:
        self._waiting.pop(job.id, None)
        self._running.pop(job.id, None)
        self._progress_s.pop(job.id, None)
        self.speculator.forget(job)
        self._asides.forget(job)
        job.leave()
        if job.sequence is not None:
            sequence, job.sequence = job.sequence, None
            held = as_tokens(job.tokens[: job.n_kv])
            if job.shares:
                self._seen.add(held)
            self.residency.release(sequence, held, keep=job.shares)

    def _expire(self) -> None:
        now = self.clock()
        for job in [*self._running.values(), *self._waiting.values()]:
            limit = job.request.generation.time_limit_s
            if limit is not None and now - job.submitted_s > limit:
                self._finish(job, "length")

    def _relieve(self) -> None:
        """The context is full: drop residents, then park the youngest request; alone, a request has reached its end."""
        if self.residency.residents and self.residency.make_room(self.backend.info.n_batch, live=len(self._running)):
            return
        if len(self._running) > 1:
            youngest = max(self._running.values(), key=lambda j: j.submitted_s)
            assert youngest.sequence is not None
            self._asides.forget(youngest)
            youngest.leave()
            held = as_tokens(youngest.tokens[: youngest.n_kv])
            if youngest.shares:
                self.residency.park(youngest.sequence, held)
            else:
                self.residency.release(youngest.sequence, held, keep=False)
            youngest.sequence, youngest.n_kv, youngest.draft = None, 0, []
            self.speculator.forget(youngest)
            del self._running[youngest.id]
            self._waiting[youngest.id] = youngest
            self.metrics.parked += 1
            self._parked_at_step = self.metrics.steps
            return
        for job in list(self._running.values()):
            self._finish(job, "length")

    def _fail_all(self, message: str) -> None:
        """A step failed in the backend: everything in it is lost, and says so."""
        for job in list(self._running.values()):
            self._running.pop(job.id)
            self.speculator.forget(job)
            self._asides.forget(job)
            job.leave()
            if job.sequence is not None:
                self.backend.drop(job.sequence)
            self._events.append(Failure(job.id, "backend_error", message))

    # --- measuring -----------------------------------------------------------------------------------------------

    def _observe(self, grants: list[Grant], seconds: float, first_outputs: int, emitted: int) -> None:
        prefilled = sum(g.n_tokens for g in grants if g.prefill)
        decoding = [g for g in grants if not g.prefill]
        rows = sum(g.n_tokens for g in decoding)
        if decoding and not prefilled:
            self.speculator.observe(sequences=len(decoding), rows=rows, tokens=emitted, seconds=seconds)
        if rows == len(decoding) and self._asides.job is None:
            # What a chunk or slice beside decoding may cost is measured in plain decode steps. After a slice their data
            # has left the caches, and they take half as long again.
            self._sizer.observe(decoded=len(decoding), prefilled=prefilled, seconds=seconds)
        self.metrics.step(
            decoded=len(decoding), emitted=emitted, prefilled=prefilled, seconds=seconds, first=first_outputs
        )

    def snapshot(self) -> dict[str, float | int | str]:
        """The metrics now, as plain values."""
        self._mind_memory()
        cache = self.residency.cache
        return {
            **self.metrics.snapshot(self.clock()),
            **self.speculator.snapshot(),
            **self.guard.snapshot(),
            "waiting": len(self._waiting),
            "running": len(self._running),
            "residents": self.residency.residents,
            "kv_cells": self.backend.info.n_ctx,
            "kv_cells_free": self.backend.cells_free(),
            "cache_bytes": cache.held_bytes,
            "cache_capacity_bytes": cache.capacity_bytes,
            "cache_evicted_tokens": cache.evicted_tokens,
            "restored_tokens": self.residency.restored_tokens,
            "lost_blocks": self.residency.lost_blocks,
            "prefill_chunk": self._sizer.chunk,
            "disk_written_bytes": self._disk.written_bytes if self._disk else 0,
            "disk_read_blocks": self._disk.read_blocks if self._disk else 0,
            "disk_bad_blocks": self._disk.bad_blocks if self._disk else 0,
        }

    def check_integrity(self) -> None:
        """Cells: free + held == capacity; cache: its own laws; no sequence is held by nobody."""
        self.residency.cache.check_integrity()
        check = getattr(self.backend, "check_integrity", None)
        if check is not None:
            check()
        held = sum(1 for j in self._running.values() if j.sequence is not None)
        assert held == len(self._running), "a running request without a sequence"


def _joined(said: list[Text]) -> Text:
    """One event for all a step said to one request: clients are woken once per step, not once per token."""
    return Text(
        said[0].id,
        "".join(t.text for t in said),
        tuple(token for t in said for token in t.tokens),
        tuple(p for t in said for p in t.logprobs),
    )
