"""What is kept of lines outside the context, and how it gets there: KV in pieces, states at points, in memory and on disk.

plain     pieces of KV: a line is taken up again anywhere
states    pieces of KV, and states at points of the line: it is taken up where a state is
whole     one snapshot of everything at a point (models whose state can't be had apart)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from localllm.engine.cache import restore as restoring
from localllm.engine.cache.block import Block, MemoryBlock
from localllm.engine.cache.budget import Budget, Room
from localllm.engine.cache.disk import DiskBlock, DiskTier
from localllm.engine.cache.restore import RestorePlan
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.tokens import Tokens, edge, next_edge
from localllm_backends.contract import Backend, BackendFailure

# Copying fewer tokens than this back is no faster than computing them.
MIN_TOKENS = 16
# Large enough that a block's own overhead vanishes, small enough that one export is a fraction of a step.
PIECE_TOKENS = 512
# From a device's memory no more runs of cells are exported at a time: each is copied by itself, twice a layer.
_MOST_RUNS = 64
# Of a line's newest states this many are kept however near they are: before its last two turns, and at its end.
_NEWEST_STATES = 3
# States nearer than this to each other save little; and together a line's take no more than this part of the memory.
_APART_TOKENS = 512
_STATE_SHARE = 0.25
# A state may cost as much memory as the KV of so many times the tokens to the next.
_STATE_COST = 4.0


class KvStore:
    """The prefix cache of one engine, with its tier on `disk` (None: none). `states` is None where there are none."""

    def __init__(self, backend: Backend, cache_bytes: int, disk: DiskTier | None = None) -> None:
        self._backend, self._disk = backend, disk
        self.budget = Budget(cache_bytes)
        self.cache = PrefixCache(whole=not backend.capabilities.segments, budget=self.budget)
        self._stateful = backend if backend.capabilities.states else None
        self.states = PrefixCache(whole=True, budget=self.budget) if self._stateful is not None else None
        self.prefill_tok_s: Callable[[], float | None] = lambda: None
        # The least seen of a token's KV, the most of a state, and (tokens, bytes) of the last whole snapshot.
        self._token_bytes = 0.0
        self._state_bytes = 0
        self._snapshot = (1, 0)
        self.lost_blocks = 0
        if disk is not None:
            disk.open(self.cache, self.states)

    @property
    def trees(self) -> list[PrefixCache]:
        """All that blocks are kept in."""
        return [self.cache] if self.states is None else [self.cache, self.states]

    @property
    def has_points(self) -> bool:
        """True where a line can be taken up only at points that something was kept for."""
        return self.cache.whole or self.states is not None

    # --- reading -------------------------------------------------------------------------------------------------

    def plan(self, prompt: Tokens, *, at_once: bool = False) -> RestorePlan:
        """What to take of what is held of `prompt`; `at_once`: without waiting for any file."""
        worth = self.worth if not at_once else lambda block, _: self.ready(block)
        return restoring.plan(self.cache, prompt[: edge(prompt, len(prompt) - 1)], worth, self.states)

    def as_of(self) -> Hashable:
        """All that a plan depends on besides its prompt: what is held, what of it is in memory, and speeds."""
        pace = None if self._disk is None else self._disk.pace
        return self.budget.changes, self.budget.held_bytes, self.prefill_tok_s(), pace

    def point(self, line: Tokens) -> tuple[int, Block] | None:
        """The longest beginning of `line` whose state is held and worth reading, and that state."""
        return restoring.point(self.states, line, self.worth) if self.states is not None else None

    def worth(self, block: Block, n_tokens: int) -> bool:
        """Is having this block quicker than computing so many tokens, as far as is known now?"""
        return self._disk is None or self._disk.worth_reading(block, n_tokens, self.prefill_tok_s())

    # --- reading ahead -------------------------------------------------------------------------------------------

    def want(self, block: Block, *, due: bool) -> bool:
        """Have a block read that is only on disk, soon or (`due`) next. False where enough is being read already; else it
        must be released."""
        if self._disk is None or not isinstance(block, DiskBlock) or block.data is not None:
            return True
        return self._disk.reads.want(block, due=due)

    def ready(self, block: Block) -> bool:
        """Does reading it wait for nothing?"""
        if self._disk is None or not isinstance(block, DiskBlock) or block.data is not None:
            return True
        return self._disk.reads.ready(block)

    def release(self, block: Block) -> None:
        """A block that was wanted is so no more."""
        if self._disk is not None and isinstance(block, DiskBlock):
            self._disk.reads.release(block)

    def wait_for_reading(self, seconds: float) -> None:
        """Wait until something was read, at most so long."""
        if self._disk is not None:
            self._disk.reads.wait(seconds)

    # --- what is held --------------------------------------------------------------------------------------------

    def lacks(self, line: Tokens) -> tuple[int, int] | None:
        """The first [start, stop) of `line` that is not held; None where all of it is, and it can be taken up at its end."""
        gap = self.cache.gap(line)
        if gap is None and self.states is not None and self.states.gap(line) is not None:
            return len(line), len(line)
        return gap

    def used(self, line: Tokens) -> None:
        """A line was used just now: what is held of it is the last to go. Of its states those that others are near to are
        the first to go."""
        self.cache.match(line)
        if self.states is not None:
            self.states.thin(line, self.apart(len(line)), _NEWEST_STATES)

    def apart(self, n_tokens: int) -> int:
        """Tokens between the states that are kept of a line of `n_tokens`: a power of two, so that the points of lines that
        begin alike fall together."""
        apart = float(_APART_TOKENS)
        if self._token_bytes:
            apart = max(apart, self._state_bytes / self._token_bytes / _STATE_COST)
        apart = max(apart, n_tokens * self._state_bytes / max(_STATE_SHARE * self.budget.capacity_bytes, 1.0))
        return 1 << (max(int(apart), 1) - 1).bit_length()

    # --- writing -------------------------------------------------------------------------------------------------

    def export_next(self, sequence: int, line: Tokens, used: int | None, *, force: bool) -> Room | None:
        """Export the next piece of `line`, which is what `sequence` holds: what came of it, or None where nothing lacks.
        `force`: its cells are needed, so what is being written is not waited for."""
        room: Room | None = None
        if self.states is not None and self.states.gap(line) is not None:
            room = self.store_state(sequence, line, used, force=force)
            if room != "never":
                return room
        # Beyond its last state KV is of no use.
        point = self.states.peek(line).saved if self.states is not None else len(line)
        gap = self.cache.gap(line[:point])
        if gap is None:
            return room
        start, stop = gap
        if not self.cache.whole:
            stop = self._piece(sequence, line, start, stop)
        return self.store(sequence, line[:stop], start, used, force=force)

    def _piece(self, sequence: int, line: Tokens, start: int, stop: int) -> int:
        """Where the piece of `line` ends that begins at `start`."""
        stop = min(stop, start + PIECE_TOKENS)
        on_device = self._backend.capabilities.kv_on_device
        while on_device and self._backend.export_runs(sequence, start, stop) > _MOST_RUNS:
            stop = start + (stop - start + 1) // 2
        whole = edge(line, stop)
        return whole if whole > start else next_edge(line, stop)

    def store(
        self,
        sequence: int,
        line: Tokens,
        start: int,
        used: int | None = None,
        *,
        force: bool = False,
        newer: bool = False,
    ) -> Room:
        """Put what `sequence` holds of `line` from `start` on into the cache: "now" if that was done. `newer`: a snapshot
        rather than an older one of the same line."""
        n_tokens = len(line) - start
        along = None if newer else line
        room = self.budget.make_room(self._guess(n_tokens), line=along, used=used, force=force)
        if room != "now":
            return room
        try:
            data = self._backend.export_range(sequence, start, len(line))
        except BackendFailure:
            return "never"
        self._token_bytes = min(self._token_bytes or len(data), len(data) / n_tokens)
        self._snapshot = (n_tokens, len(data))
        room = self.budget.make_room(len(data), line=along, used=used, force=force)
        return room if room != "now" else self._insert(self.cache, line, data, start, used)

    def store_state(
        self, sequence: int, line: Tokens, used: int | None = None, *, force: bool = False, newer: bool = False
    ) -> Room:
        """Put the state behind `line`, which is all that `sequence` holds, into the cache. `newer`: rather than an older one
        of the same line."""
        if self._stateful is None or self.states is None:
            return "never"
        along = None if newer else line
        n_bytes = self._stateful.state_bytes(sequence)
        if self._disk is None and n_bytes + int(self._token_bytes * len(line)) > self.budget.capacity_bytes:
            # The KV before it would not fit beside it.
            return "never"
        room = self.budget.make_room(n_bytes, line=along, used=used, force=force)
        if room != "now":
            return room
        try:
            data = self._stateful.export_state(sequence)
        except BackendFailure:
            return "never"
        self._state_bytes = max(self._state_bytes, len(data))
        return self._insert(self.states, line, data, 0, used)

    def _guess(self, n_tokens: int) -> int:
        """The least that the export of so many tokens can have, in bytes."""
        if not self.cache.whole:
            return int(self._token_bytes * n_tokens)
        tokens, n_bytes = self._snapshot
        return int(n_bytes * min(1.0, n_tokens / tokens))

    def _insert(self, tree: PrefixCache, line: Tokens, data: bytes, start: int, used: int | None) -> Room:
        block: Block = MemoryBlock(data, start, len(line))
        if self._disk is not None:
            block = self._disk.make_block(line, data, start, state=tree is self.states)
        if not tree.insert(line, block, used):
            return "never"
        if isinstance(block, DiskBlock) and self._disk is not None:
            self._disk.keep(block, line)
        return "now"

    def lost(self, block: Block) -> None:
        """A block could not be read or imported."""
        self.lost_blocks += 1
        for tree in self.trees:
            tree.forget(block)
        if isinstance(block, DiskBlock):
            # It would be found again after every restart.
            block.path.unlink(missing_ok=True)

    # --- the disk ------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """What became of the copies since: written, demoted to disk, evicted."""
        if self._disk is not None:
            self._disk.news(self.trees)

    def hurry(self, wanted: bool) -> None:
        """Somebody waits for room that writing makes, or no more."""
        if self._disk is not None:
            self._disk.hurry(wanted)

    def wait(self, seconds: float) -> bool:
        """Wait until something was written, at most so long; False if nothing was."""
        return self._disk is not None and self._disk.wait(seconds)

    def check_integrity(self) -> None:
        """The laws of its trees."""
        for tree in self.trees:
            tree.check_integrity()
