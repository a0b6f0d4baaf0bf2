"""Restores a cached prefix into the context, part by part.

Each part is weighed separately: a part on disk is read if that is faster than computing the tokens
needed from it. A part that is not worth reading, was evicted or is lost leaves a gap. The tokens
of the gap are computed, and the parts after it are still imported. Another thread reads files
ahead of time. The owner of a restoration checks whether it is `ready`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localllm.engine.cache.eviction import Block
from localllm.engine.cache.matching import RestorePlan
from localllm.engine.cache.store import KvStore
from localllm.engine.cache.tree import CachedPart
from localllm.engine.tokens import Tokens
from localllm_backends.contract import Backend, BackendFailure, NoCellsError


@dataclass
class Restoration:
    """The import of a prompt's cached parts into `sequence`.

    `n_tokens` tokens are in the sequence now, `imported` of them from the cache. The blocks stay
    locked in the cache until the restoration is `done` or closed. Failures are not raised:
    tokens that can't be restored are computed, and counted by reason in `missed`.
    """

    kv: KvStore
    backend: Backend
    sequence: int
    prompt: Tokens
    plan: RestorePlan
    n_tokens: int = 0
    imported: int = 0
    done: bool = False
    missed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = list(reversed(self.plan.parts))
        self._gap_start = self.in_place = self.n_tokens
        # All tokens in the sequence. The sequence could continue only after the first `n_tokens` of
        # them.
        self._reached = self.n_tokens
        self._queued: list[Block] = []
        self._lock()
        self._miss("unread", self.plan.unread)
        self._queue_reads()

    @property
    def due_tokens(self) -> int:
        """Tokens that are still to be imported, if room is made for them part by part; else 0."""
        if self.plan.divisible:
            return sum(part.n_tokens for part in self._parts)
        return 0

    @property
    def next_tokens(self) -> int:
        """The part of `due_tokens` that the next step imports."""
        if self._parts and self.plan.divisible:
            return self._parts[-1].n_tokens
        return 0

    @property
    def computes_to(self) -> int | None:
        """The end of the gap to compute before the next part; None if there is no gap."""
        if self._parts and self._parts[-1].start > self._reached:
            return self._parts[-1].start
        return None

    @property
    def importing(self) -> bool:
        """True while the next part can be imported as soon as it is read."""
        return not self.done and self.computes_to is None

    @property
    def ready(self) -> bool:
        """True if the next part can be imported now. Gives up parts that take too long to read."""
        while self.importing:
            if self.kv.in_memory(self._parts[-1].block):
                return True
            # The tokens to compute if the disk is given up. A divisible plan loses only the parts
            # that are not in memory, any other plan the entire prefix.
            to_compute = [p.n_tokens for p in self._parts if not self.kv.in_memory(p.block)]
            if self.plan.divisible:
                n_tokens = sum(to_compute)
            else:
                n_tokens = self.plan.saved
            if self.kv.is_worth_reading(self._remaining_blocks(), n_tokens):
                # A block that another restoration had read may be gone again.
                self._queue_reads()
                break
            self._give_up()
        return False

    def _remaining_blocks(self) -> list[Block]:
        """The blocks that are still to be imported, in order."""
        return [part.block for part in reversed(self._parts)]

    def _queue_reads(self) -> None:
        """Queue reads of the next blocks, as far ahead as allowed. Closes if no part is left."""
        if not self._parts:
            self.close()
            return
        remaining = self._remaining_blocks()
        for block in [b for b in self._queued if b not in remaining]:
            self._queued.remove(block)
            self.kv.disk.reads.release(block)
        for block in remaining:
            if block in self._queued or self.kv.in_memory(block):
                continue
            if not self.kv.disk.reads.want(block, due=block is remaining[0]):
                break
            self._queued.append(block)

    def _give_up(self) -> None:
        """Give up the disk, because computing is faster, and continue with the parts in memory."""
        if self.plan.divisible:
            in_memory = [part for part in self._parts if self.kv.in_memory(part.block)]
            self._miss(
                "unread", sum(p.n_tokens for p in self._parts) - sum(p.n_tokens for p in in_memory)
            )
            self._parts = in_memory
            self._queue_reads()
        else:
            self._replan("unread", at_once=True)

    def step(self) -> None:
        """Import the next part, which must follow the tokens held."""
        part = self._parts.pop()
        assert part.start == self._reached, "a gap must be computed first"
        try:
            self._import(part)
        except NoCellsError:
            # There is less room than promised. The tokens restored so far remain valid.
            self._miss("no_cells", part.n_tokens + sum(p.n_tokens for p in self._parts))
            self._parts.clear()
            if not self.plan.divisible:
                self.backend.truncate(self.sequence, 0)
        except BackendFailure:
            # A block that this build can't read is a miss.
            self.backend.truncate(self.sequence, self.n_tokens)
            self._lose(part.block, part.n_tokens)
        self._queue_reads()

    def _import(self, part: CachedPart) -> None:
        data = self.kv.read(part.block)
        if data is None:
            self._lose(part.block, part.n_tokens)
            return
        if part.n_tokens:
            self.backend.import_range(self.sequence, data, part.start, part.stop)
        else:
            # The state makes the imported KV a sequence that can continue.
            self.backend.import_state(self.sequence, data, part.stop)
        self._reached = self._gap_start = part.stop
        if self.plan.divisible or not self._parts:
            self.imported += part.stop - self.n_tokens
            self.n_tokens = part.stop

    def at_once(self) -> None:
        """Import everything up to the first gap."""
        while self.importing:
            self.step()
        self.close()

    def computed(self, n_tokens: int) -> None:
        """Record that the sequence now holds `n_tokens` tokens.

        If this fills a gap, the gap's KV is stored in the cache as a block of its own.
        """
        self.n_tokens = self._reached = n_tokens
        if self.computes_to is None and self._parts:
            self.kv.store(self.sequence, self.prompt[:n_tokens], self._gap_start)

    def close(self) -> None:
        """Unlock the blocks. The tokens held stay in the sequence."""
        if not self.done:
            self.done = True
            for block in self._queued:
                self.kv.disk.reads.release(block)
            self._queued = []
            _unlock(self.plan)

    def _lock(self) -> None:
        for tree, match in self.plan.to_lock:
            tree.lock(match)

    def _lose(self, block: Block, n_tokens: int) -> None:
        self.kv.lost(block)
        if self.plan.divisible:
            self._miss("lost", n_tokens)
            return
        self._replan("lost", at_once=False)

    def _replan(self, reason: str, *, at_once: bool) -> None:
        """Restart from token 0 with the next best plan."""
        self.backend.truncate(self.sequence, 0)
        self.n_tokens = self._reached = 0
        self._gap_start = 0
        previous = self.plan
        self.plan = self.kv.plan(self.prompt, at_once=at_once)
        self._lock()
        _unlock(previous)
        self._parts = list(reversed(self.plan.parts))
        self._miss(reason, previous.saved - self.plan.saved)
        self._queue_reads()

    def _miss(self, reason: str, n_tokens: int) -> None:
        if n_tokens > 0:
            self.missed[reason] = self.missed.get(reason, 0) + n_tokens


def _unlock(plan: RestorePlan) -> None:
    for tree, match in plan.to_lock:
        tree.unlock(match)
