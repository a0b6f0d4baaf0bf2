"""Admission: which waiting request joins the running ones, with as much of its prefix as can be had.

    waiting → restoring (its cached prefix comes back, gaps in it are computed) → running (prefill, then decode)

When the context is full the youngest one is parked: it waits again, and what it has read stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from localllm.engine.job import Job
from localllm.engine.jobs import Jobs
from localllm.engine.memory_policy import MemoryPolicy
from localllm.engine.messages import Prefill
from localllm.engine.misses import miss_reason, recomputed
from localllm.engine.prefix_cache import as_tokens
from localllm.engine.scheduler import admission_order
from localllm.engine.sequence_pool import NOWHERE, PrefixSource
from localllm_backends.contract import Backend, NoCellsError

# Admission keeps this many cells for the answer; an answer that grows past them may park a younger request.
_ANSWER_RESERVE_TOKENS = 128
# A prefix somebody is prefilling right now is waited for when it saves at least this much.
_WORTH_WAITING_TOKENS = 16


@dataclass
class Admission:
    """Moves jobs from waiting to running, and back when there is no room."""

    backend: Backend
    jobs: Jobs
    memory: MemoryPolicy
    _parked_at_step: int = -1

    def admit(self) -> None:
        """Let in who fits, least work first."""
        if not self.jobs.waiting:
            return
        if self.jobs.running and self.jobs.metrics.steps == self._parked_at_step:
            # Those that one was parked for go on first: joining them again at once would end in parking again.
            return
        most = self.memory.may_run()
        while self.jobs.waiting and len(self.jobs.running) < most:
            now = self.jobs.clock()
            sources = {job.id: self._source(job, self.jobs.running.values()) for job in self.jobs.waiting.values()}
            order = admission_order(
                [(j.id, len(j.tokens) - sources[j.id].length, now - j.submitted_s) for j in self.jobs.waiting.values()]
            )
            if not any(self._try_admit(self.jobs.waiting[key], sources[key], now) for key in order):
                return

    def _try_admit(self, job: Job, source: PrefixSource, now: float) -> bool:
        rewinds = self.backend.capabilities.rewind == "any"
        if rewinds and prefix_in_progress(job, source, self.jobs.running.values()):
            return False
        tokens = as_tokens(job.tokens)
        left = job.max_tokens - job.n_generated
        reserve = min(left, _ANSWER_RESERVE_TOKENS)
        need = self.jobs.pool.needs_cells(source, min(len(tokens) + reserve, self.backend.info.n_ctx))
        # Besides, everybody's next step must fit, or somebody is parked in it.
        growing = sum(j.pending for j in self.jobs.running.values())
        live = len(self.jobs.running) + (0 if source.kind == "resident" else 1)
        if not self.jobs.pool.make_room(need + growing, live=live, keep=source.resident):
            if self.jobs.running:
                return False
            self.jobs.pool.make_room(self.backend.info.n_ctx, live=1)
            source = self._source(job, ())
        try:
            taken = self.jobs.pool.take(source, tokens)
        except NoCellsError:
            return False
        job.sequence, job.n_kv, job.restoring, job.known = taken.sequence, taken.held, taken.rest, source.known
        job.state = "restoring"
        del self.jobs.waiting[job.id]
        self.jobs.running[job.id] = job
        if not job.admissions:
            job.queued_s = now - job.submitted_s
        job.admitted_s = now
        return True

    def _source(self, job: Job, live: Iterable[Job]) -> PrefixSource:
        """Where its prefix can come from; a job that does not share takes nothing, and nobody takes from it."""
        if not job.shares:
            return NOWHERE
        return self.jobs.pool.lookup(as_tokens(job.tokens), [j for j in live if j.shares])

    def restore(self) -> None:
        """Import what admitted requests find in the cache: one piece a step while somebody decodes, else all of it."""
        streams = self.jobs.decoding
        imported = False
        for job in self.jobs.running.values():
            if job.running:
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
        self.jobs.pool.restored_tokens += 0 if job.restoring is None else taken
        line = as_tokens(job.tokens)
        if job.admissions:
            self.jobs.metrics.recomputed("parked", len(line) - 1 - taken)
        else:
            self.jobs.metrics.prompt_tokens += job.n_prompt
            if job.shares:
                job.known = max(job.known, self.jobs.seen.known(line[:-1]))
            job.cached = taken
            again = recomputed(job.known, taken, missed, whole=self.jobs.pool.cache.whole)
            for reason, n_tokens in again.items():
                self.jobs.metrics.recomputed(reason, n_tokens)
            job.miss = miss_reason(job, again, self.backend.is_control)
            self.jobs.metrics.cached_tokens += taken
        job.restoring, job.state = None, "running"
        job.admissions += 1
        if self.jobs.pool.cache.whole and job.shares:
            job.checkpoints = checkpoints(job, self.backend.is_control)
        self.jobs.events.append(Prefill(job.id, job.n_kv, job.n_prompt, job.cached))

    def relieve(self) -> None:
        """The context is full: drop residents, then park the youngest request; alone, a request has reached its end."""
        pool, running = self.jobs.pool, self.jobs.running
        if pool.residents and pool.make_room(self.backend.info.n_batch, live=len(running)):
            return
        if len(running) > 1:
            self.jobs.park(max(running.values(), key=lambda j: j.submitted_s))
            self._parked_at_step = self.jobs.metrics.steps
            return
        for job in list(running.values()):
            self.jobs.finish(job, "length")


def prefix_in_progress(job: Job, source: PrefixSource, running: Iterable[Job]) -> bool:
    """True while a running prefill is computing tokens this job needs too: waiting beats prefilling them twice."""
    prompt = job.tokens
    for other in running:
        if not other.prefilling or not (job.shares and other.shares):
            continue
        ahead = min(len(other.tokens), len(prompt) - 1)
        shared = 0
        if other.tokens[:ahead] == prompt[:ahead]:
            shared = ahead
        elif ahead > source.length:
            a, b = np.asarray(other.tokens[:ahead]), np.asarray(prompt[:ahead])
            shared = int(np.argmax(a != b))
        if other.n_kv < shared and shared - source.length >= _WORTH_WAITING_TOKENS:
            return True
    return False


def checkpoints(job: Job, is_control: Callable[[int], bool]) -> list[int]:
    """Where to store the state of a model that can't go back: before the last two turns of the prompt."""
    control = [i for i in range(job.n_prompt - 1, -1, -1) if is_control(job.tokens[i])]
    same = [i for i in control if job.tokens[i] == job.tokens[control[0]]][:2] if control else []
    return sorted(i for i in same if i > job.n_kv)
