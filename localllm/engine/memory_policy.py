"""What the engine does about memory: the prefix cache shrinks first, then, where a request's KV takes more of it, nobody
joins the running batch."""

from __future__ import annotations

from dataclasses import dataclass

from localllm.engine.host.memory import MemoryGuard, return_to_system
from localllm.engine.messages import Failure
from localllm.engine.request_table import RequestTable
from localllm_backends.contract import Backend


@dataclass
class MemoryPolicy:
    """Acts on what the `guard` sees. `cache_bytes`: the prefix cache's size in memory while nobody else wants it."""

    guard: MemoryGuard
    jobs: RequestTable
    backend: Backend
    cache_bytes: int

    def __post_init__(self) -> None:
        # Where the KV is all there after loading, a request takes no more memory.
        loaded = self.backend.memory()
        self._kv_at_load = loaded.kv_bytes + loaded.recurrent_bytes > 0

    def mind(self, *, give_back_all: bool = False) -> None:
        """Look at what is available now and then; under pressure the prefix cache shrinks and stops growing."""
        guard, budget = self.guard, self.jobs.pool.kv.budget
        if not guard.look(self.jobs.clock(), force=give_back_all):
            return
        if guard.pressure != "none" and budget.shrink(budget.held_bytes if give_back_all else guard.missing_bytes):
            return_to_system()
            guard.look(self.jobs.clock(), force=True)
        most = self.cache_bytes
        budget.resize(most if guard.pressure == "none" else min(most, budget.held_bytes))

    def may_run(self) -> int:
        """How many requests may run together now. Where KV grows and memory is nearly gone nobody joins others, and a
        request alone is served if its KV can be had for all that we can give back."""
        if self.guard.pressure != "hold" or self._kv_at_load:
            return self.backend.info.n_seq_max
        if self.jobs.running:
            return 1
        self.jobs.pool.make_room(self.backend.info.n_ctx, live=1)
        self.mind(give_back_all=True)
        if self.guard.pressure == "hold":
            # One that was parked in mid-answer is not refused: it has begun.
            for job in [j for j in self.jobs.waiting.values() if not j.admissions]:
                hint = "close other programs, then send the request again"
                self.jobs.fail(job, Failure(job.id, "server_busy", self.guard.why(), hint))
        return 1
