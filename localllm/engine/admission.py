"""Admission and memory pressure. Decides which waiting request runs next, and restores as much of
its prefix as possible.

    waiting → restoring (import the cached prefix, compute gaps in it) → running (prefill, then
    decode)

When the context is full, the youngest request is parked: it waits again, and its computed KV stays
in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from localllm.engine.cache import tunables
from localllm.engine.cache.eviction import Block
from localllm.engine.cache.matching import (
    NO_SOURCE,
    PrefixSource,
    PromptMatch,
)
from localllm.engine.cache.restore import Restoration
from localllm.engine.kv_receiving import KvReceiver
from localllm.engine.messages import Failure, Prefill
from localllm.engine.request import RunningRequest
from localllm.engine.request_table import RequestTable
from localllm.engine.scheduler import StepDemand, admission_order
from localllm.engine.transfer.wire import BLOCK_TOKENS
from localllm.memory.guard import MemoryGuard
from localllm.memory.system import return_to_system
from localllm_backends.contract import Backend, NoCellsError

# Admission keeps this many cells free for the answer. A longer answer may cause a younger request
# to be parked.
_ANSWER_RESERVE_TOKENS = 128
# If a running prefill will provide at least this many tokens of a prefix, the request waits for it.
_WORTH_WAITING_TOKENS = 16
# While a stream decodes, no further part of a prefix and no further block of another server is
# imported in a step that imported this many tokens.
_STEP_TOKENS = 128
# If no stream decodes, this many blocks of other servers may be imported before the next step.
_MAX_BLOCKS = 64


@dataclass
class Admission:
    """Moves requests from waiting to running, and back if there is no room. Reacts to the memory
    `guard`.

    `cache_bytes`: size of the prefix cache in memory while other programs do not need that memory.
    `awaits_disk`: a request could continue after a disk read or a transfer that is in progress.
    `receiver`: imports KV that other servers send.
    """

    backend: Backend
    jobs: RequestTable
    guard: MemoryGuard
    cache_bytes: int
    receiver: KvReceiver
    awaits_disk: bool = False
    _parked_at_step: int = -1
    _not_admitted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # If all KV is allocated at load, a request takes no more memory.
        loaded = self.backend.memory()
        self._kv_at_load = loaded.kv_bytes + loaded.recurrent_bytes > 0

    def admit(self) -> None:
        """Admit requests that fit. The tenant that has received the fewest tokens comes first, and
        its request with the least work."""
        self.awaits_disk = False
        if self.jobs.shares.shared:
            present = [*self.jobs.waiting.values(), *self.jobs.running.values()]
            self.jobs.shares.keep_only(job.share_key for job in present)
            self._not_admitted &= self.jobs.waiting.keys()
        # After a request was parked, the others first run a step. Otherwise it would join them
        # again and be parked again.
        if not self.jobs.waiting or (
            self.jobs.running and self.jobs.metrics.steps == self._parked_at_step
        ):
            return
        max_running = self._max_running()
        while self.jobs.waiting and (
            len(self.jobs.running) < max_running
            or self.jobs.shares.shared
            or self._low_priority_running()
        ):
            if not self._admit_next(max_running):
                return

    def _admit_next(self, max_running: int) -> bool:
        """Admit the first request in the order that can run. At most `max_running` requests may run
        together. Returns False if no request can be admitted."""
        now = self.jobs.clock()
        shares = self.jobs.shares
        placed = {shares.share_unit(job.share_key) for job in self.jobs.running.values()}
        ready = [job for job in self.jobs.waiting.values() if not job.blocked]
        demands = []
        for job in ready:
            to_read = len(job.tokens) - self._source(job).length
            computed = shares.tokens_computed(job.share_key, placed)
            demands.append(StepDemand(job.id, to_read, 0, now - job.arrived_s, computed))
        order = admission_order(demands)
        if not order:
            return False
        first, *others = (self.jobs.waiting[key] for key in order)
        has_slot = len(self.jobs.running) < max_running
        if has_slot and self._try_admit(first, now):
            return True
        if self._preempt_low_priority_for(first, max_running, now):
            return True
        if shares.shared and self._preempt_tenant_for(first, max_running, now):
            return True
        return has_slot and any(self._try_admit(job, now) for job in others)

    def _low_priority_running(self) -> list[RunningRequest]:
        """The running requests of low priority, if another request waits."""
        if all(job.background for job in self.jobs.waiting.values()):
            return []
        return [job for job in self.jobs.running.values() if job.background]

    def _preempt_low_priority_for(self, job: RunningRequest, max_running: int, now: float) -> bool:
        """Admit `job` in the place of the youngest requests of low priority, which are parked. Their
        KV stays in the cache. Returns False if it waits for something else."""
        if not self._low_priority_running():
            return False
        source = self._source(job)
        running = self.jobs.running
        if (
            job.background
            or job.id in self._not_admitted
            or prefix_in_progress(job, source, running.values())
            or not self._require_state(job, source.state)
        ):
            return False
        while True:
            if len(running) < max_running and self._try_admit(job, now):
                return True
            victims = self._low_priority_running()
            if not victims:
                self._not_admitted.add(job.id)
                return False
            self.jobs.park(max(victims, key=attrgetter("arrived_s")))

    def _preempt_tenant_for(self, job: RunningRequest, max_running: int, now: float) -> bool:
        """Make room for `job`, whose tenant is next, by parking the youngest requests of the tenant
        with the most running requests. Their KV stays in the cache.

        Returns True if `job` was admitted.
        """
        source = self._source(job)
        must_wait = prefix_in_progress(
            job, source, self.jobs.running.values()
        ) or not self._require_state(job, source.state)
        if must_wait or job.id in self._not_admitted:
            return False
        running = self.jobs.running
        shares = self.jobs.shares
        while True:
            unit = shares.unit_to_preempt(job.share_key, (j.share_key for j in running.values()))
            if unit is None:
                break
            victims = [j for j in running.values() if shares.share_unit(j.share_key) == unit]
            self.jobs.park(max(victims, key=attrgetter("arrived_s")))
            if len(running) < max_running and self._try_admit(job, now):
                return True
        # Do not park requests for it again: from now on it waits for room like the others.
        self._not_admitted.add(job.id)
        return False

    def _try_admit(self, job: RunningRequest, now: float) -> bool:
        source = self._source(job)
        rewinds = self.backend.capabilities.rewind == "any"
        if rewinds and prefix_in_progress(job, source, self.jobs.running.values()):
            return False
        if not self._require_state(job, source.state):
            return False
        if not self._make_room(job, source):
            if self.jobs.running:
                return False
            self.jobs.pool.make_room(self.backend.info.n_ctx, live=1)
            source = self._source(job)
        elif not self._require_state(job, source.state):
            # Making room evicted the state from memory.
            return False
        try:
            restoration = self.jobs.pool.take(source, _matching(job).tokens)
        except NoCellsError:
            return False
        job.sequence = restoration.sequence
        job.n_kv = restoration.n_tokens
        job.restoring = restoration
        job.known = source.known
        self._require_state(job, None)
        job.matching = None
        del self.jobs.waiting[job.id]
        self.jobs.running[job.id] = job
        if not job.admissions:
            job.queued_s = now - job.submitted_s
        job.admitted_s = now
        return True

    def _make_room(self, job: RunningRequest, source: PrefixSource) -> bool:
        """Make room for the prompt and part of the answer, in addition to the next step of all
        running requests. With fewer cells a request would be parked in that step. Returns False if
        there are too few."""
        running = self.jobs.running.values()
        pool = self.jobs.pool
        tokens = _matching(job).tokens
        reserve = min(job.max_tokens - job.n_generated, _ANSWER_RESERVE_TOKENS)
        need = pool.needs_cells(source, min(len(tokens) + reserve, self.backend.info.n_ctx))
        growing = sum(j.pending for j in running)
        restoring_tokens = sum(j.restoring.due_tokens for j in running if j.restoring is not None)
        if not pool.can_reserve(need + growing + restoring_tokens, source):
            return False
        live = len(running) + (source.idle is None)
        # Cells for divisible KV are freed while it is imported, so that evicted KV can take its
        # place in the cache.
        importable = source.plan.saved if source.plan.divisible else 0
        return pool.make_room(
            need + growing - importable, live=live, source=source, prompt=tokens[:-1]
        )

    def _require_state(self, job: RunningRequest, state: Block | None) -> bool:
        """True if the `state` that a waiting job needs is in memory (None: it needs no state).
        Otherwise start reading it from disk."""
        kv = self.jobs.pool.kv
        if job.reading is not None and job.reading is not state:
            kv.disk.reads.release(job.reading)
            job.reading = None
        if state is None or kv.in_memory(state):
            return True
        if job.reading is None:
            kv.disk.reads.want(state, due=True)
            job.reading = state
        self.awaits_disk = True
        return False

    def _source(self, job: RunningRequest) -> PrefixSource:
        """The source of the job's cached prefix. A job that does not share its KV has no source,
        and is no source for others."""
        if not job.shares:
            return NO_SOURCE
        running = [j for j in self.jobs.running.values() if j.shares]
        return self.jobs.pool.lookup(_matching(job), running)

    def evict_idle(self) -> None:
        """Evict idle sequences before a prompt is read."""
        running = self.jobs.running.values()
        n_tokens = 0
        if not self.jobs.decoding:
            n_tokens = sum(job.to_compute for job in running)
        self.jobs.pool.evict_idle(n_tokens, live=len(running), clock=self.jobs.clock)

    def restore(self) -> None:
        """Import cached prefixes of admitted requests, then KV of other servers: about one piece
        per step while any request decodes, otherwise all of them. Requests of the tenant with the
        fewest tokens come first. Does not wait for pieces that have not arrived."""
        is_decoding = self.jobs.decoding
        imported = 0
        jobs = self.jobs.running.values()
        shares = self.jobs.shares
        for job in sorted(jobs, key=lambda j: shares.tokens_computed(j.share_key) or 0):
            restoring = job.restoring
            if restoring is None:
                continue
            imported += self._import_parts(restoring, imported if is_decoding else None)
            self.awaits_disk |= restoring.importing
            more_coming = False
            if restoring.done:
                before = job.fetched_tokens
                max_blocks = _MAX_BLOCKS
                if is_decoding:
                    max_blocks = max(0, _STEP_TOKENS - imported) // BLOCK_TOKENS
                more_coming = self.receiver.receive(
                    job, restoring, max_blocks, is_decoding=is_decoding
                )
                imported += job.fetched_tokens - before
            self.awaits_disk |= more_coming
            job.n_kv = restoring.n_tokens
            if restoring.done and not more_coming:
                self._begin(job, restoring)

    def _import_parts(self, restoring: Restoration, imported: int | None) -> int:
        """Import the parts that have arrived, until this step has imported `_STEP_TOKENS`. Returns
        the number of tokens. `imported`: tokens so far in this step (None: no limit)."""
        running = self.jobs.running.values()
        n_tokens = 0
        while restoring.ready and (imported is None or imported + n_tokens < _STEP_TOKENS):
            if restoring.next_tokens:
                # In addition to the cells that running requests are about to compute.
                cells = restoring.next_tokens + sum(j.to_compute for j in running)
                self.jobs.pool.make_room(cells, live=len(running))
            before = restoring.n_tokens
            restoring.step()
            n_tokens += restoring.n_tokens - before or _STEP_TOKENS
        return n_tokens

    def _begin(self, job: RunningRequest, restoring: Restoration) -> None:
        """Start the prefill, after all available parts of the prefix are restored."""
        n_cached = restoring.in_place + restoring.imported
        self.jobs.pool.restored_tokens += restoring.imported
        if job.admissions:
            self.jobs.metrics.recomputed_tokens["parked"] += max(0, job.parked_tokens - n_cached)
        else:
            self.jobs.metrics.prompt_tokens += job.n_prompt
            if job.shares:
                job.known = max(job.known, self.jobs.history.known(job.cache_tokens()[:-1]))
            job.cached = n_cached
            available = n_cached + job.fetched_tokens
            recomputed_by_reason = recomputed(
                job.known,
                available,
                restoring.missed,
                has_points=self.jobs.pool.kv.states is not None,
            )
            for reason, n_tokens in recomputed_by_reason.items():
                self.jobs.metrics.recomputed_tokens[reason] += n_tokens
            job.miss = miss_reason(
                job,
                recomputed_by_reason,
                lambda token: token >= 0 and self.backend.is_control(token),
            )
            self.jobs.metrics.cached_tokens += n_cached
        job.restoring = None
        job.admissions += 1
        prompt = job.tokens[: job.n_prompt]
        if job.shares:
            job.checkpoints = self.jobs.pool.checkpoints(prompt, job.n_kv, job.known)
        self.jobs.events.append(Prefill(job.id, job.n_kv, job.n_prompt, job.cached))

    def free_cells(self) -> None:
        """Free cells when the context is full: drop an idle sequence, or park the youngest request.
        A single request ends with "length".

        It always frees a sequence, however many cells the backend reports as free. llama.cpp may
        find no cell for a sliding window, because it does not reuse the window's cells while two
        sequences hold them.
        """
        running = self.jobs.running
        if self.jobs.pool.drop_one():
            return
        if len(running) > 1:
            self.jobs.park(max(running.values(), key=attrgetter("arrived_s")))
            self._parked_at_step = self.jobs.metrics.steps
            return
        for job in list(running.values()):
            self.jobs.finish(job, "length")

    def check_memory_pressure(self, *, release_all: bool = False) -> None:
        """Check from time to time how much memory is available. Under pressure the prefix cache
        shrinks and stops growing."""
        guard = self.guard
        budget = self.jobs.pool.kv.budget
        if not guard.update(self.jobs.clock(), force=release_all):
            return
        if guard.pressure != "none" and budget.shrink(
            budget.held_bytes if release_all else guard.missing_bytes
        ):
            return_to_system()
            guard.update(self.jobs.clock(), force=True)
        max_bytes = self.cache_bytes
        budget.resize(max_bytes if guard.pressure == "none" else min(max_bytes, budget.held_bytes))

    def _max_running(self) -> int:
        """How many requests may run together now. If no request can run, the waiting ones are
        rejected.

        If KV grows with use and memory is nearly exhausted, no further request joins. A single
        request runs if its KV fits after all other memory was released.
        """
        if self.guard.pressure != "hold" or self._kv_at_load:
            return self.backend.info.n_seq_max
        if self.jobs.running:
            return 1
        self.jobs.pool.make_room(self.backend.info.n_ctx, live=1)
        self.check_memory_pressure(release_all=True)
        if self.guard.pressure == "hold":
            # A parked request is not rejected, because its answer has begun.
            for job in [j for j in self.jobs.waiting.values() if not j.admissions]:
                hint = "close other programs, then send the request again"
                self.jobs.fail(job, Failure(job.id, "server_busy", self.guard.reason(), hint))
        return 1


def prefix_in_progress(
    job: RunningRequest, source: PrefixSource, running: Iterable[RunningRequest]
) -> bool:
    """True while a running prefill computes tokens that this job needs too. Waiting is cheaper than
    prefilling them twice."""
    for other in running:
        if not other.prefilling or not (job.shares and other.shares):
            continue
        shared = min(_matching(job).shared(other), len(job.tokens) - 1)
        if other.n_kv < shared and shared - source.length >= _WORTH_WAITING_TOKENS:
            return True
    return False


def _matching(job: RunningRequest) -> PromptMatch:
    """The state of comparing the job's prompt with the cache. It is kept while the job waits."""
    if job.matching is None:
        job.matching = PromptMatch(job.cache_tokens())
    return job.matching


# --- why it is computed again ---------------------------------------------------------------------

_REASONS = {
    "evicted": "were evicted",
    "unread": "were faster to compute than to read from disk",
    "lost": "were lost on disk",
    "no_cells": "did not fit the context",
    "short": "were too few to be worth a copy",
    "no_snapshot": "have no snapshot from which this model could continue",
}


def recomputed(
    known: int, available: int, missed: dict[str, int], *, has_points: bool
) -> dict[str, int]:
    """Count the tokens of a prompt that had KV before and must be computed again, by reason
    (`metrics.RECOMPUTED`).

    `known` tokens had KV. `available` of them need no computing, and `missed` gives the reason for
    some of the others.
    """
    missing_tokens = known - available
    by_reason = {}
    for reason, n_tokens in missed.items():
        by_reason[reason] = min(n_tokens, max(missing_tokens, 0))
        missing_tokens -= by_reason[reason]
    if missing_tokens > 0:
        if known < tunables.MIN_TOKENS:
            reason_of_rest = "short"
        elif has_points:
            reason_of_rest = "no_snapshot"
        else:
            reason_of_rest = "evicted"
        by_reason[reason_of_rest] = by_reason.get(reason_of_rest, 0) + missing_tokens
    return {reason: n for reason, n in by_reason.items() if n}


def miss_reason(
    job: RunningRequest, by_reason: dict[str, int], is_control: Callable[[int], bool]
) -> str:
    """Why the rest of the prompt had to be computed, as text ("": all of it was cached). For
    `by_reason` see `recomputed`."""
    max_cached = job.n_prompt - 1
    if job.cached >= max_cached:
        return ""
    if not job.shares:
        return "the request disabled the cache"
    if sum(by_reason.values()) > tunables.MIN_TOKENS or (job.known >= max_cached and by_reason):
        return "; ".join(f"{n} known tokens {_REASONS[reason]}" for reason, n in by_reason.items())
    if job.known == 0:
        return "the prompt shares no beginning with earlier prompts"
    # Check each distinct token once: a known prompt may have a hundred thousand tokens.
    known = job.tokens[: job.known]
    turns = sum(map(known.count, filter(is_control, set(known))))
    return f"differs from the cached prompt from token {job.known} (after {turns} control tokens)"
