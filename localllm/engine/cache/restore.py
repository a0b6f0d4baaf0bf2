"""A cached prefix on its way back into the context: what of it to take, and taking it piece by
piece.

Each piece is weighed by itself: one on disk is worth reading when that is quicker than computing
the tokens wanted of it. What is not worth reading, was evicted or is lost is a gap: its tokens are
computed, and what lies behind is still taken. What is on disk is read by another thread, ahead of
its turn; who owns a restoration asks whether it is `ready`.
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
    """A prompt's cached parts being imported into `sequence`, which has its first `held` tokens.
    Its blocks stay in the cache until it is `done` or closed. `held` tokens are in the sequence
    now, `imported` of them from the cache. Fails silently: what can't be had is computed, and
    counted by reason in `missed`."""

    kv: KvStore
    backend: Backend
    sequence: int
    prompt: Tokens
    plan: RestorePlan
    held: int = 0
    imported: int = 0
    done: bool = False
    missed: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts = list(reversed(self.plan.parts))
        self._gap_start = self.in_place = self.held
        # Tokens in the sequence; `held` are those that it could go on behind.
        self._reached = self.held
        self._wanted: list[Block] = []
        self._lock()
        self._miss("unread", self.plan.unread)
        self._look_ahead()

    @property
    def due_tokens(self) -> int:
        """What is still to be imported, for which room is made part by part."""
        if self.plan.divisible:
            return sum(part.n_tokens for part in self._parts)
        return 0

    @property
    def next_tokens(self) -> int:
        """What the next step imports of that."""
        if self._parts and self.plan.divisible:
            return self._parts[-1].n_tokens
        return 0

    @property
    def computes_to(self) -> int | None:
        """Where the gap ends that must be computed before the next part can be imported; None when
        none is due."""
        if self._parts and self._parts[-1].start > self._reached:
            return self._parts[-1].start
        return None

    @property
    def importing(self) -> bool:
        """True while the next part can be imported once it is read."""
        return not self.done and self.computes_to is None

    @property
    def ready(self) -> bool:
        """True where the next part can be imported now. One that takes too long to read is given up
        here."""
        while self.importing:
            if self.kv.in_memory(self._parts[-1].block):
                return True
            # Tokens that are computed where the disk is given up: of what can be taken apart those
            # that are not in memory, else all of the prefix.
            late = [p.n_tokens for p in self._parts if not self.kv.in_memory(p.block)]
            if self.plan.divisible:
                n_tokens = sum(late)
            else:
                n_tokens = self.plan.saved
            if self.kv.worth_reading(self._coming(), n_tokens):
                # What somebody else had read may be gone again.
                self._look_ahead()
                break
            self._give_up()
        return False

    def _coming(self) -> list[Block]:
        """What is still to be imported, in its order."""
        return [part.block for part in reversed(self._parts)]

    def _look_ahead(self) -> None:
        """Have what comes next read, as far ahead as may be; or end where nothing does."""
        if not self._parts:
            self.close()
            return
        coming = self._coming()
        for block in [b for b in self._wanted if b not in coming]:
            self._wanted.remove(block)
            self.kv.disk.reads.release(block)
        for block in coming:
            if block in self._wanted or self.kv.in_memory(block):
                continue
            if not self.kv.disk.reads.want(block, due=block is coming[0]):
                break
            self._wanted.append(block)

    def _give_up(self) -> None:
        """The disk is slower than computing would be: go on with what is in memory."""
        if self.plan.divisible:
            left = [part for part in self._parts if self.kv.in_memory(part.block)]
            self._miss(
                "unread", sum(p.n_tokens for p in self._parts) - sum(p.n_tokens for p in left)
            )
            self._parts = left
            self._look_ahead()
        else:
            self._replan("unread", at_once=True)

    def step(self) -> None:
        """Import the next part, which must follow what is held."""
        part = self._parts.pop()
        assert part.start == self._reached, "a gap must be computed first"
        try:
            self._import(part)
        except NoCellsError:
            # Less room than was promised: what is restored so far is still right.
            self._miss("no_cells", part.n_tokens + sum(p.n_tokens for p in self._parts))
            self._parts.clear()
            if not self.plan.divisible:
                self.backend.truncate(self.sequence, 0)
        except BackendFailure:
            # A block this build can't read is a miss.
            self.backend.truncate(self.sequence, self.held)
            self._lose(part.block, part.n_tokens)
        self._look_ahead()

    def _import(self, part: CachedPart) -> None:
        data = self.kv.read(part.block)
        if data is None:
            self._lose(part.block, part.n_tokens)
            return
        if part.n_tokens:
            self.backend.import_range(self.sequence, data, part.start, part.stop)
        else:
            # what makes the imported KV a sequence that can go on
            self.backend.import_state(self.sequence, data, part.stop)
        self._reached = self._gap_start = part.stop
        if self.plan.divisible or not self._parts:
            self.imported += part.stop - self.held
            self.held = part.stop

    def at_once(self) -> None:
        """Import all of it that comes without computing."""
        while self.importing:
            self.step()
        self.close()

    def computed(self, held: int) -> None:
        """The sequence holds `held` tokens now. A gap that is filled goes to the cache as a block
        of its own."""
        self.held = self._reached = held
        if self.computes_to is None and self._parts:
            self.kv.store(self.sequence, self.prompt[:held], self._gap_start)

    def close(self) -> None:
        """Let go of the blocks; what is held stays."""
        if not self.done:
            self.done = True
            for block in self._wanted:
                self.kv.disk.reads.release(block)
            self._wanted = []
            _unlock(self.plan)

    def _lock(self) -> None:
        for tree, match in self.plan.held:
            tree.lock(match)

    def _lose(self, block: Block, n_tokens: int) -> None:
        self.kv.lost(block)
        if self.plan.divisible:
            self._miss("lost", n_tokens)
            return
        self._replan("lost", at_once=False)

    def _replan(self, reason: str, *, at_once: bool) -> None:
        """The next best that can be gone on from, from the beginning."""
        self.backend.truncate(self.sequence, 0)
        self.held = self._reached = 0
        self._gap_start = 0
        held = self.plan
        self.plan = self.kv.plan(self.prompt, at_once=at_once)
        self._lock()
        _unlock(held)
        self._parts = list(reversed(self.plan.parts))
        self._miss(reason, held.saved - self.plan.saved)
        self._look_ahead()

    def _miss(self, reason: str, n_tokens: int) -> None:
        if n_tokens > 0:
            self.missed[reason] = self.missed.get(reason, 0) + n_tokens


def _unlock(plan: RestorePlan) -> None:
    for tree, match in plan.held:
        tree.unlock(match)
