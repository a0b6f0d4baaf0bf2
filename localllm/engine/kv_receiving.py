"""The server that asks for KV: imports the blocks that another server sends for a prompt.

After the cached prefix of a request is restored, the conductor decides whether the rest is fetched.
Blocks are imported between two steps. If a transfer ends early, another server of the pool is asked
for the rest, and otherwise the rest is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from localllm.engine.adapters import named_adapters
from localllm.engine.cache.pool import SequencePool
from localllm.engine.cache.restore import Restoration
from localllm.engine.cache.tree import as_tokens
from localllm.engine.request import RunningRequest
from localllm.engine.transfer.conductor import Conductor
from localllm.engine.transfer.errors import TransferError
from localllm.engine.transfer.fetching import FetchedBlock, KvFetch, WantedKv


@dataclass
class KvReceiver:
    """The transfers of `running` requests, by id.

    `conductor`: decides which prompts other servers read. `report_progress`: is called with a
    request and the number of its tokens that have KV.
    """

    conductor: Conductor
    pool: SequencePool
    running: Mapping[str, RunningRequest]
    report_progress: Callable[[RunningRequest, int], object]
    _fetches: dict[str, KvFetch] = field(default_factory=dict)

    def receive(
        self, job: RunningRequest, restoring: Restoration, max_blocks: int, *, is_decoding: bool
    ) -> bool:
        """Import up to `max_blocks` blocks that another server has sent. Returns True while more
        are to come.

        The first call for an admission decides whether anything is fetched. `is_decoding`: other
        requests decode.
        """
        if job.fetch_asked != job.admissions:
            job.fetch_asked = job.admissions
            job.fetch = self._begin_fetch(job, restoring.n_tokens, is_decoding=is_decoding)
        if job.fetch is None:
            return False
        fetch = self._fetches[job.id]
        capabilities = self.conductor.backend.capabilities
        fetch.yields = is_decoding and capabilities.threaded and not capabilities.kv_on_device
        error = self._import(job, restoring, fetch, max_blocks)
        # The thread that receives may have failed after the import looked: the next call sees that.
        if error is None and (not fetch.complete or fetch.ready):
            return True
        self._end_fetch(job, restoring, error)
        if error is not None and error.reason != "no_cells":
            # Another server of the pool may have the rest. One that failed is not asked again.
            job.fetch = self._begin_copy(job, restoring.n_tokens)
        return job.fetch is not None

    def _import(
        self, job: RunningRequest, restoring: Restoration, fetch: KvFetch, max_blocks: int
    ) -> TransferError | None:
        """Import up to `max_blocks` blocks. Returns the error if that fails, or if no block
        comes."""
        while max_blocks and fetch.ready:
            max_blocks -= 1
            error = self._place(job, restoring, fetch.take())
            if error is not None:
                return error
        if fetch.ready:
            return None
        if not fetch.done and self.conductor.late(fetch):
            return TransferError("its next block came too late", reason="late")
        return fetch.error

    def _begin_fetch(self, job: RunningRequest, start: int, *, is_decoding: bool) -> KvFetch | None:
        """Begin to fetch the KV of the job's tokens from `start` on; None if they are computed
        here."""
        self._fetches = {key: f for key, f in self._fetches.items() if key in self.running}
        if not job.shares or job.sends:
            return None
        fetch = self._begin_copy(job, start)
        if fetch is None:
            wanted = self._wanted(job, job.tokens, start)
            fetch = self.conductor.begin(wanted, is_decoding=is_decoding)
        if fetch is not None:
            self._fetches[job.id] = fetch
        return fetch

    def _begin_copy(self, job: RunningRequest, start: int) -> KvFetch | None:
        """Begin to copy the beginning that the prompt shares with others from a server of the
        pool; None if no server is known to have it."""
        shared = job.request.shared
        if shared is None:
            return None
        wanted = self._wanted(job, job.tokens[: shared.n_tokens + 1], start)
        fetch = self.conductor.copy(wanted, shared.servers)
        if fetch is not None:
            self._fetches[job.id] = fetch
        return fetch

    def _wanted(self, job: RunningRequest, tokens: list[int], start: int) -> WantedKv:
        adapters = named_adapters(self.conductor.backend.info, job.adapters)
        return WantedKv(as_tokens(tokens), start, job.request.generation.salt, adapters)

    def _place(
        self, job: RunningRequest, restoring: Restoration, block: FetchedBlock
    ) -> TransferError | None:
        """Import a block. Returns the error if that fails."""
        assert job.sequence is not None
        if not block.state:
            # In addition to the cells that running requests are about to compute.
            others = sum(j.to_compute for j in self.running.values() if j is not job)
            cells = block.stop - block.start + others
            self.pool.make_room(cells, live=len(self.running))
        error = self.conductor.place(job.sequence, block)
        if error is None and not block.state:
            job.fetched_tokens += block.stop - block.start
            restoring.computed(block.stop)
            self.report_progress(job, block.stop)
        if (
            error is None
            and self.pool.kv.states is not None
            and (block.state or self.pool.kv.snapshots)
        ):
            # The next prompt may branch off before the answer.
            self.pool.checkpoint(job.sequence, job.cache_tokens(0, block.stop))
        return error

    def _end_fetch(
        self, job: RunningRequest, restoring: Restoration, error: TransferError | None
    ) -> None:
        """End the transfer. With an `error`, the rest of the prompt is computed here."""
        fetch = self._fetches.pop(job.id)
        job.fetch = None
        assert job.sequence is not None
        if error is not None and fetch.lacks_state and job.fetched_tokens:
            # Without its state, the model can't continue after the blocks.
            self.conductor.backend.truncate(job.sequence, 0)
            restoring.computed(0)
            job.fetched_tokens = 0
        if job.fetched_tokens:
            job.fetched_from = fetch.peer.name
        self.conductor.learn_from(fetch, error)
