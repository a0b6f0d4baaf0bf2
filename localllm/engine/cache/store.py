"""What is kept of sequences outside the context, in memory and on disk, how it gets there, and at
which points:

pieces of KV, where a sequence can be taken up again anywhere; and else states at points of it, where
it can be. Behind a state stand pieces of KV too, or it is a snapshot: all there is is in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from time import perf_counter

from localllm.engine.cache import tunables
from localllm.engine.cache.disk import Copy, DiskTier
from localllm.engine.cache.eviction import (
    Block,
    CacheBudget,
    Candidate,
    EvictablePool,
    Space,
)
from localllm.engine.cache.matching import RestorePlan, longest, plan_restore
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.step_costs import PrefillCost
from localllm.engine.tokens import Tokens, image_boundary, next_image_boundary
from localllm_backends.contract import Backend, BackendFailure


class KvStore:
    """The prefix cache of one engine, with its tier on `disk`. `states` is None where there are
    none; where they are `snapshots`, nothing else is kept, and `cache` stays empty."""

    def __init__(
        self,
        backend: Backend,
        cache_bytes: int,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._backend = backend
        self._clock = clock
        self.disk = DiskTier() if disk is None else disk
        self.budget = CacheBudget(
            cache_bytes, save=self._save, wait_for_writing=self._wait_for_writing
        )
        able = backend.capabilities
        self.snapshots = not able.segments
        self.cache = PrefixCache(budget=self.budget)
        points = able.states or self.snapshots
        self.states: PrefixCache | None = None
        self.trees = [self.cache]
        if points:
            self.states = PrefixCache("state", budget=self.budget)
            self.trees.append(self.states)
        self.speed = PrefillCost()
        # The least seen of a token's KV, or of its share of a snapshot, and the most of a state.
        self._token_bytes = 0.0
        self._state_bytes = 0
        self._export_s = 0.0  # the least seen of a state's copy: others only ever add time
        self.lost_blocks = 0
        self.closing = False  # nothing can stay in the context
        self._patience_s = 0.0
        self.disk.open(self.cache, self.states)

    # --- reading ----------------------------------------------------------------------------------

    def plan(self, prompt: Tokens, *, at_once: bool = False) -> RestorePlan:
        """What to take of what is held of `prompt`; `at_once`: without waiting for any file."""
        should_load = self.should_load
        if at_once:
            should_load = self._held_in_memory
        most = prompt[: image_boundary(prompt, len(prompt) - 1)]
        return plan_restore(self.cache, most, should_load, self.states, snapshots=self.snapshots)

    def version(self) -> Hashable:
        """All that a plan depends on besides its prompt: what is held, what of it is in memory, and
        what computing costs. (How fast the disk is says its restoration, which weighs each part.)"""
        return self.budget.changes, self.budget.held_bytes, self.speed.token_s

    def longest_state(self, prefix: Tokens) -> tuple[int, Block | None]:
        """The longest beginning of `prefix` whose state is held and worth reading, and that
        state: for a sequence that has its KV, so no snapshot."""
        if self.states is None or self.snapshots:
            return 0, None
        match = longest(self.states, prefix, self.should_load)
        return match.saved, match.parts[0].block if match.parts else None

    def read(self, block: Block) -> bytes | memoryview | None:
        """Its bytes, held in memory from now on if there is room; None when they turned out to be
        lost or corrupt (a miss, never a wrong answer)."""
        if block.data is not None:
            return block.data
        reads = self.disk.reads
        if reads.ready(block):
            data = reads.get(block)
        else:
            data = self.disk.load(block)
        if data is not None:
            for tree in self.trees:
                tree.promote(block, data)
        return data

    def should_load(self, block: Block, n_tokens: int) -> bool:
        """Is having this block quicker than computing so many tokens, as far as is known now?"""
        return self.worth_reading([block], n_tokens)

    def worth_reading(self, blocks: Iterable[Block], n_tokens: int) -> bool:
        """Are those of `blocks` read that are not in memory before so many tokens are computed?"""
        late = [block for block in blocks if not self.in_memory(block)]
        return not late or self.disk.reads.is_worth(late, n_tokens * self.speed.token_s)

    def in_memory(self, block: Block) -> bool:
        """Does having it wait for no file?"""
        return block.data is not None or self.disk.reads.ready(block)

    def _held_in_memory(self, block: Block, n_tokens: int) -> bool:
        """`should_load` for plans that wait for no file."""
        del n_tokens
        return self.in_memory(block)

    # --- other places than memory -----------------------------------------------------------------

    def _save(self, candidate: Candidate, until: int) -> Space:
        return self._write(candidate.pool, candidate.block, until, leaves=True)

    # --- what is held -----------------------------------------------------------------------------

    def holds(self, prefix: Tokens) -> bool:
        """Is all of `prefix` held, and can it be taken up at its end?"""
        return self.has_state(prefix) and (self.snapshots or self.cache.gap(prefix) is None)

    def has_state(self, prefix: Tokens) -> bool:
        """Is the state behind `prefix` held, if one is needed?"""
        return self.states is None or self.states.gap(prefix) is None

    def touch(self, prefix: Tokens) -> None:
        """A sequence was used just now: what is held of it is the last to go. Of its states those
        that others are near to are the first to go."""
        for tree in self.trees:
            tree.match(prefix)
        if self.states is not None and not self.snapshots:
            self.states.prune(prefix, self.state_interval(len(prefix)))

    def state_interval(self, n_tokens: int) -> int:
        """Tokens between the states that are kept of a sequence of `n_tokens`, by what a token's
        KV, a state, its copy and all of the cache take: a power of two, so that the points of
        sequences that begin alike fall together."""
        share_bytes = max(tunables.STATE_SHARE * self.budget.capacity_bytes, 1.0)
        interval = max(tunables.STATE_INTERVAL_TOKENS, n_tokens * self._state_bytes / share_bytes)
        if self._token_bytes:
            interval = max(interval, self._state_bytes / self._token_bytes / tunables.STATE_COST)
        if self._export_s > tunables.DEAR_EXPORT_S and self.speed.token_s:
            interval = max(interval, self._export_s / (self.speed.token_s * tunables.EXPORT_SHARE))
        return 1 << (max(int(interval), 1) - 1).bit_length()

    # --- writing ----------------------------------------------------------------------------------

    def export_next(
        self, sequence: int, prefix: Tokens, used: int | None, *, force: bool
    ) -> Space | None:
        """Export the next piece of `prefix`, which is what `sequence` holds: "free" if it found
        room, or None where nothing is missing. `force`: its cells are needed, so what is being
        written is not waited for."""
        space: Space | None = None
        if not self.has_state(prefix):
            space = self.store_state(sequence, prefix, used, force=force)
            if space != "full":
                return space
        # Beyond its last state KV is of no use.
        if self.states is not None:
            point = self.states.peek(prefix).saved
        else:
            point = len(prefix)
        gap = None if self.snapshots else self.cache.gap(prefix[:point])
        if gap is None:
            return space
        start, stop = gap
        stop = self._piece(sequence, prefix, start, stop)
        return self.store(sequence, prefix[:stop], start, used, force=force)

    def export_end(self, sequence: int, prefix: Tokens, start: int, used: int | None) -> None:
        """Export what isn't held of `prefix` from `start` on, which is about to leave the context,
        as far as there is room for it by evicting what was used before `used`."""
        gap = self.cache.gap(prefix, start)
        while gap is not None:
            start, stop = gap
            stop = self._piece(sequence, prefix, start, stop)
            if self.store(sequence, prefix[:stop], start, used, force=True) != "free":
                return
            gap = self.cache.gap(prefix, stop)

    def _piece(self, sequence: int, prefix: Tokens, start: int, stop: int) -> int:
        """Where the piece of `prefix` ends that begins at `start`."""
        stop = min(stop, start + tunables.PIECE_TOKENS)
        if self._backend.capabilities.kv_on_device:
            while self._backend.export_runs(sequence, start, stop) > tunables.MOST_RUNS:
                stop = start + (stop - start + 1) // 2
        whole = image_boundary(prefix, stop)
        if whole > start:
            return whole
        return next_image_boundary(prefix, stop)

    def store(
        self,
        sequence: int,
        prefix: Tokens,
        start: int,
        used: int | None = None,
        *,
        force: bool = False,
    ) -> Space:
        """Put what `sequence` holds of `prefix` from `start` on into the cache: "free" if there was
        room."""
        n_tokens = len(prefix) - start
        until = used
        if not (force or self.states is not None or self.closing):
            # It need not leave the context: only what is forgotten makes way for it.
            until = min(self.budget.uses if used is None else used, self.budget.forgotten)
        room = partial(self.budget.make_room, prefix=prefix, used=until, force=force)
        space = room(int(self._token_bytes * n_tokens))
        if space != "free":
            return space
        try:
            data = self._backend.export_range(sequence, start, len(prefix))
        except BackendFailure:
            return "full"
        self._token_bytes = min(self._token_bytes or len(data), len(data) / n_tokens)
        space = room(len(data))
        if space != "free":
            return space
        return self._insert(self.cache, prefix, data, start, used)

    def store_state(
        self,
        sequence: int,
        prefix: Tokens,
        used: int | None = None,
        *,
        force: bool = False,
        newer: bool = False,
    ) -> Space:
        """Put the state behind `prefix`, which is all that `sequence` holds, into the cache.
        `newer`: rather than an older one of the same sequence."""
        assert self.states is not None
        backend = self._backend
        along = None if newer else prefix
        room = partial(self.budget.make_room, prefix=along, used=used, force=force)
        kv_bytes = int(self._token_bytes * len(prefix))
        if self.snapshots:
            n_bytes = kv_bytes
        else:
            n_bytes = backend.state_bytes(sequence)
        apart_bytes = 0 if self.snapshots else kv_bytes
        if not self.disk.capacity_bytes and n_bytes + apart_bytes > self.budget.capacity_bytes:
            # The KV before it would not fit beside it.
            return "full"
        space = room(n_bytes)
        if space != "free":
            return space
        started = self._clock()
        n = len(prefix)
        try:
            if self.snapshots:
                data = backend.export_range(sequence, 0, n)
            else:
                data = backend.export_state(sequence)
        except BackendFailure:
            return "full"
        took_s = self._clock() - started
        self._export_s = min(self._export_s or took_s, took_s)
        self._state_bytes = max(self._state_bytes, len(data))
        if self.snapshots:
            self._token_bytes = min(self._token_bytes or len(data), len(data) / n)
        space = room(len(data))
        if space != "free":
            return space
        return self._insert(self.states, prefix, data, 0, used)

    def _insert(
        self, tree: PrefixCache, prefix: Tokens, data: bytes, start: int, used: int | None
    ) -> Space:
        block = self.disk.make_block(prefix, data, start, tree.kind)
        if not tree.insert(prefix, block, used):
            return "full"
        self._write(tree, block, self.budget.uses if self.closing else self.budget.forgotten)
        return "free"

    def _write(
        self, pool: EvictablePool, block: Block, until: int, *, leaves: bool = False
    ) -> Space:
        """Have a block written that only memory holds ("pending"), if room for it can be made of
        files used until then, or of files of what is elsewhere too; unless it `leaves` memory, only
        of what was used before it, or two would be written by turns. "free": it can't or needn't be
        written."""
        line = pool.line(block) if self.disk.wants(block) else None
        if line is None:
            return "free"
        until = min(until, block.file_time_ns)
        before = math.inf if leaves else block.file_time_ns
        for at in sorted({until, min(until, self.budget.forgotten)}):
            missing = self.disk.missing_bytes(block.file_bytes, at)
            if missing <= 0 or self.disk.remove_copies(self._copies(before), missing, at):
                self.disk.write(block, line, until)
                return "pending"
        return "full"

    def _copies(self, before_ns: float) -> list[Copy]:
        """What has a file and is elsewhere too, and was used before then, unused the longest
        first."""
        held = {block: pool for pool, block in self.budget.in_context()}
        held |= {c.block: c.pool for c in self.budget.candidates()}
        found = [
            (pool, block)
            for block, pool in held.items()
            if block.written and not block.pending and block.file_time_ns < before_ns
        ]
        return sorted(found, key=lambda copy: copy[1].file_time_ns)

    def close(self) -> None:
        """Nothing stays in memory: have it written, the newest first, once it is known what became
        of what waits for that."""
        self.disk.flush()
        self.disk.sync(self.trees)
        for candidate in reversed(self.budget.candidates()):
            if self._write(candidate.pool, candidate.block, self.budget.uses) == "full":
                return

    def lost(self, block: Block) -> None:
        """A block could not be read or imported."""
        self.lost_blocks += 1
        for tree in self.trees:
            tree.forget(block)
        if block.written:
            # It would be found again after every restart.
            block.path.unlink(missing_ok=True)

    # --- the disk ---------------------------------------------------------------------------------

    def be_patient(self, n_tokens: int) -> None:
        """What leaves the context for so many tokens may wait for room that writing makes: for a
        part of what reading them costs."""
        self._patience_s = min(
            tunables.WRITE_WAIT_S, tunables.WRITE_WAIT_SHARE * n_tokens * self.speed.token_s
        )

    def _wait_for_writing(self) -> bool:
        until_s = self._clock() + self._patience_s
        self.disk.hurry(True)
        written = self._patience_s > 0 and self.disk.wait(self._patience_s)
        self._patience_s = until_s - self._clock()
        self.disk.sync(self.trees)
        return written


# --- at which points of a prompt a state is kept -------------------------------------------------

IsToken = Callable[[int], bool]


def checkpoints(
    prompt: Sequence[int],
    n_kv: int,
    known: int,
    is_control: IsToken,
    ends_paragraph: IsToken,
    interval: int | None,
) -> list[int]:
    """Points of `prompt`, whose first `n_kv` tokens are held, at which its state is to be kept
    (control tokens stand around turns, others end a paragraph):

    * before its last two turns: an answer is asked for again from there, or rendered in another way
      next time. Not before the answer's where the question is short: a step and a state for each
      turn would cost more than reading it again
    * near its end, where no turn begins there

    And where states are kept apart from KV, every `interval` tokens (None: they aren't):

    * where it leaves what was known (its first `known` tokens): what branches twice branches again
    * one in every `interval` tokens, where a turn begins if one does
    * where the last paragraph begins: instructions or a document stand before it, and the next
      question goes on from there (Gemma's template has both in one turn)
    * of a long end with neither in it a few points, ever nearer to it"""
    n = len(prompt)
    control = [i for i in range(n) if is_control(prompt[i])]
    turns = [i for i in control if prompt[i] == prompt[control[-1]]]
    points = set(turns[-2:])
    if interval is not None:
        points.add(known)
        start = max(n_kv, known)
        points |= _paragraph(prompt, start, ends_paragraph) or _towards_the_end(points, turns, n)
        points |= _spaced(turns, n, interval)
    last = max((p for p in points if tunables.NEAR_TOKENS <= p < n), default=0)
    if n - last > (tunables.WORTH_A_STEP_TOKENS if last else tunables.NEAR_TOKENS):
        points.add(n - tunables.TAIL_TOKENS)
    required = {*turns[-2:-1], n - tunables.TAIL_TOKENS}
    if known == n - 1 and interval is not None:
        # The same prompt again: it will be sent once more.
        required.add(known)
    return _apart([p for p in points if tunables.NEAR_TOKENS <= p < n], required, n_kv)


def _apart(points: Sequence[int], required: set[int], n_kv: int) -> list[int]:
    """Those of `points` behind what is held that are `required`, or not near to one before."""
    kept: list[int] = []
    for point in sorted(p for p in points if p > n_kv):
        before = kept[-1] if kept else n_kv
        if point in required or point - before >= tunables.NEAR_TOKENS:
            kept.append(point)
    return kept


def _paragraph(prompt: Sequence[int], start: int, ends_paragraph: IsToken) -> set[int]:
    """Where the last one begins, if it is far enough behind `start`; nothing nearer is looked
    at."""
    worth = range(len(prompt) - 1, start + tunables.WORTH_A_PARAGRAPH_TOKENS - 1, -1)
    return set(next(([i] for i in worth if ends_paragraph(prompt[i - 1])), []))


def _towards_the_end(points: set[int], turns: Sequence[int], n: int) -> set[int]:
    """Some before where the prompt ends, or the turn before the answer's, which has just begun;
    unless one of `points` is near them."""
    if turns and n - turns[-1] < tunables.NEAR_TOKENS:
        end = turns[-1]
    else:
        end = n
    others = {0, *points}

    def has_neighbour(point: int) -> bool:
        return any(
            point - tunables.POINTS_FROM_THE_END[0] <= p < point + tunables.NEAR_TOKENS
            for p in others
        )

    found = {end - far for far in tunables.POINTS_FROM_THE_END}
    return {point for point in found if not has_neighbour(point)}


def _spaced(turns: Sequence[int], n: int, interval: int) -> set[int]:
    found = set()
    for start in range(interval, n, interval):
        begins = [t for t in turns if start - interval < t <= start]
        found.add(begins[-1] if begins else start)
    return found
