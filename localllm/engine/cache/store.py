"""The KV that is kept outside the context, in memory and on disk, and how it gets there.

If a sequence can continue anywhere, pieces of its KV are kept. Otherwise states at certain points
are kept, and the sequence can continue only there. The KV before a state is either kept in pieces
as well, or the state is a full snapshot that contains everything.
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
from localllm.engine.tokens import Tokens, media_boundary, next_media_boundary
from localllm_backends.contract import Backend, BackendFailure


class KvStore:
    """The prefix cache of one engine, with its tier on `disk`.

    `states` is None if the model needs no states. With `snapshots`, everything is in the states,
    and `cache` stays empty.
    """

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
        capabilities = backend.capabilities
        self.snapshots = not capabilities.segments
        self.cache = PrefixCache(budget=self.budget)
        needs_states = capabilities.states or self.snapshots
        self.states: PrefixCache | None = None
        self.trees = [self.cache]
        if needs_states:
            self.states = PrefixCache("state", budget=self.budget)
            self.trees.append(self.states)
        self.speed = PrefillCost()
        # The smallest size of a token's KV, or of its share of a snapshot, and the largest of a
        # state.
        self._token_bytes = 0.0
        self._state_bytes = 0
        self._export_s = 0.0  # the shortest time of a state's copy; other load only adds time
        self.lost_blocks = 0
        self.closing = False  # True on shutdown: no sequence can stay in the context.
        self._write_wait_s = 0.0
        self.disk.open(self.cache, self.states)

    # --- reading ----------------------------------------------------------------------------------

    def plan(self, prompt: Tokens, *, at_once: bool = False) -> RestorePlan:
        """Plan which of the cached parts of `prompt` to restore. `at_once`: without waiting for
        files.
        """
        should_load = self.should_load
        if at_once:
            should_load = self._held_in_memory
        tokens = prompt[: media_boundary(prompt, len(prompt) - 1)]
        return plan_restore(self.cache, tokens, should_load, self.states, snapshots=self.snapshots)

    def version(self) -> Hashable:
        """All that a plan depends on except its prompt: the blocks held, those in memory, and
        compute cost.

        The speed of the disk is left out: the restoration weighs each part by itself.
        """
        return self.budget.changes, self.budget.held_bytes, self.speed.token_s

    def longest_state(self, prefix: Tokens) -> tuple[int, Block | None]:
        """The longest prefix of `prefix` whose state is held and worth reading, and that state.

        It is for a sequence that has the KV of the prefix, so it never returns snapshots.
        """
        if self.states is None or self.snapshots:
            return 0, None
        match = longest(self.states, prefix, self.should_load)
        return match.saved, match.parts[0].block if match.parts else None

    def read(self, block: Block) -> bytes | memoryview | None:
        """The block's bytes, kept in memory from now on if there is room.

        Returns None if they are lost or corrupt: that is a cache miss and never a wrong answer.
        """
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
        """Is reading this block faster than computing `n_tokens`, as far as is known now?"""
        return self.is_worth_reading([block], n_tokens)

    def is_worth_reading(self, blocks: Iterable[Block], n_tokens: int) -> bool:
        """Are those of `blocks` that are not in memory read before `n_tokens` could be computed?"""
        unread = [block for block in blocks if not self.in_memory(block)]
        return not unread or self.disk.reads.is_worth_reading(unread, n_tokens * self.speed.token_s)

    def in_memory(self, block: Block) -> bool:
        """True if no file must be read to use the block."""
        return block.data is not None or self.disk.reads.ready(block)

    def _held_in_memory(self, block: Block, n_tokens: int) -> bool:
        """`should_load` for plans that wait for no file."""
        del n_tokens
        return self.in_memory(block)

    # --- freeing memory ---------------------------------------------------------------------------

    def _save(self, candidate: Candidate, until_ns: int) -> Space:
        return self._write(candidate.pool, candidate.block, until_ns, leaves=True)

    # --- what is held -----------------------------------------------------------------------------

    def holds(self, prefix: Tokens) -> bool:
        """Is all of `prefix` held, and can a sequence continue at its end?"""
        return self.has_state(prefix) and (self.snapshots or self.cache.gap(prefix) is None)

    def has_state(self, prefix: Tokens) -> bool:
        """Is the state after `prefix` held, if the model needs one?"""
        return self.states is None or self.states.gap(prefix) is None

    def touch(self, prefix: Tokens) -> None:
        """Mark a sequence as used now: its blocks become the last to be evicted.

        States with close neighbours become the first to be evicted.
        """
        for tree in self.trees:
            tree.match(prefix)
        if self.states is not None and not self.snapshots:
            self.states.mark_surplus(prefix, self.state_interval(len(prefix)))

    def state_interval(self, n_tokens: int) -> int:
        """Tokens between the states that are kept of a sequence of `n_tokens`.

        The interval depends on the cost of a token's KV, a state, its copy, and the size of the
        cache. It is a power of two, so that sequences with a common beginning have their states at
        the same points.
        """
        share_bytes = max(tunables.STATE_SHARE * self.budget.capacity_bytes, 1.0)
        interval = max(tunables.STATE_INTERVAL_TOKENS, n_tokens * self._state_bytes / share_bytes)
        if self._token_bytes:
            interval = max(interval, self._state_bytes / self._token_bytes / tunables.STATE_COST)
        if self._export_s > tunables.SLOW_EXPORT_S and self.speed.token_s:
            interval = max(interval, self._export_s / (self.speed.token_s * tunables.EXPORT_SHARE))
        return 1 << (max(int(interval), 1) - 1).bit_length()

    # --- writing ----------------------------------------------------------------------------------

    def export_next(
        self, sequence: int, prefix: Tokens, used_ns: int | None, *, force: bool
    ) -> Space | None:
        """Export the next missing piece of `prefix`, which is all that `sequence` holds.

        `force`: its cells are needed now, so the result is never "pending" (see
        `CacheBudget.make_room`). Returns "free" if there was room, None if no piece is missing.
        """
        space: Space | None = None
        if not self.has_state(prefix):
            space = self.store_state(sequence, prefix, used_ns, force=force)
            if space != "full":
                return space
        # KV after the last state can't be used.
        if self.states is not None:
            point = self.states.peek(prefix).saved
        else:
            point = len(prefix)
        gap = None if self.snapshots else self.cache.gap(prefix[:point])
        if gap is None:
            return space
        start, stop = gap
        stop = self._piece(sequence, prefix, start, stop)
        return self.store(sequence, prefix[:stop], start, used_ns, force=force)

    def export_end(self, sequence: int, prefix: Tokens, start: int, used_ns: int | None) -> None:
        """Export the missing KV of `prefix` from `start` on, which is about to leave the context.

        Stops when no more room can be made by evicting blocks that were used before `used_ns`.
        """
        gap = self.cache.gap(prefix, start)
        while gap is not None:
            start, stop = gap
            stop = self._piece(sequence, prefix, start, stop)
            if self.store(sequence, prefix[:stop], start, used_ns, force=True) != "free":
                return
            gap = self.cache.gap(prefix, stop)

    def _piece(self, sequence: int, prefix: Tokens, start: int, stop: int) -> int:
        """The end of the piece of `prefix` that begins at `start`."""
        stop = min(stop, start + tunables.PIECE_TOKENS)
        if self._backend.capabilities.kv_on_device:
            while self._backend.export_runs(sequence, start, stop) > tunables.MAX_RUNS:
                stop = start + (stop - start + 1) // 2
        boundary = media_boundary(prefix, stop)
        if boundary > start:
            return boundary
        return next_media_boundary(prefix, stop)

    def store(
        self,
        sequence: int,
        prefix: Tokens,
        start: int,
        used_ns: int | None = None,
        *,
        force: bool = False,
    ) -> Space:
        """Copy the KV of `prefix` from `start` on from `sequence` into the cache.

        Returns "free" if there was room.
        """
        n_tokens = len(prefix) - start
        until_ns = used_ns
        if not (force or self.states is not None or self.closing):
            # The sequence can stay in the context, so only blocks unused for an hour are evicted
            # for it.
            until_ns = min(
                self.budget.last_use_ns if used_ns is None else used_ns, self.budget.stale_before_ns
            )
        make_room = partial(self.budget.make_room, prefix=prefix, used_ns=until_ns, force=force)
        space = make_room(int(self._token_bytes * n_tokens))
        if space != "free":
            return space
        try:
            data = self._backend.export_range(sequence, start, len(prefix))
        except BackendFailure:
            return "full"
        self._token_bytes = min(self._token_bytes or len(data), len(data) / n_tokens)
        space = make_room(len(data))
        if space != "free":
            return space
        return self._insert(self.cache, prefix, data, start, used_ns)

    def store_state(
        self,
        sequence: int,
        prefix: Tokens,
        used_ns: int | None = None,
        *,
        force: bool = False,
        newer: bool = False,
    ) -> Space:
        """Copy the state after `prefix`, which is all that `sequence` holds, into the cache.

        `newer`: it may replace an older state of the same sequence. Returns "free" if there was
        room.
        """
        assert self.states is not None
        backend = self._backend
        keep = None if newer else prefix
        make_room = partial(self.budget.make_room, prefix=keep, used_ns=used_ns, force=force)
        kv_bytes = int(self._token_bytes * len(prefix))
        if self.snapshots:
            n_bytes = kv_bytes
        else:
            n_bytes = backend.state_bytes(sequence)
        apart_bytes = 0 if self.snapshots else kv_bytes
        if not self.disk.capacity_bytes and n_bytes + apart_bytes > self.budget.capacity_bytes:
            # The KV before the state would not fit into memory together with it.
            return "full"
        space = make_room(n_bytes)
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
        space = make_room(len(data))
        if space != "free":
            return space
        return self._insert(self.states, prefix, data, 0, used_ns)

    def _insert(
        self, tree: PrefixCache, prefix: Tokens, data: bytes, start: int, used_ns: int | None
    ) -> Space:
        block = self.disk.make_block(prefix, data, start, tree.kind)
        if not tree.insert(prefix, block, used_ns):
            return "full"
        self._write(
            tree, block, self.budget.last_use_ns if self.closing else self.budget.stale_before_ns
        )
        return "free"

    def _write(
        self, pool: EvictablePool, block: Block, until_ns: int, *, leaves: bool = False
    ) -> Space:
        """Queue a block that is only in memory to be written, if the disk has room or room can be
        made.

        Room comes from files last used by `until_ns`. It also comes from files whose blocks are
        also in memory or the context. If the block stays in memory (`leaves` is False), or if the
        engine closes and no copy remains elsewhere, only copies used before it count. Otherwise two
        blocks would replace each other's files again and again.

        Returns "pending" if it is queued, "free" if it can't or needn't be written, "full" if
        there is no room.
        """
        tokens = pool.tokens_of(block) if self.disk.wants(block) else None
        if tokens is None:
            return "free"
        until_ns = min(until_ns, block.file_time_ns)
        before = math.inf if leaves and not self.closing else block.file_time_ns
        for at in sorted({until_ns, min(until_ns, self.budget.stale_before_ns)}):
            missing = self.disk.missing_bytes(block.file_bytes, at)
            if missing <= 0 or self.disk.remove_copies(self._copies(before), missing, at):
                self.disk.write(block, tokens, until_ns)
                return "pending"
        return "full"

    def _copies(self, before_ns: float) -> list[Copy]:
        """Blocks with a file and another copy that were used before `before_ns`, least recently
        used first.
        """
        copies = {block: pool for pool, block in self.budget.in_context()}
        copies |= {c.block: c.pool for c in self.budget.unlocked()}
        written = [
            (pool, block)
            for block, pool in copies.items()
            if block.written and not block.pending and block.file_time_ns < before_ns
        ]
        return sorted(written, key=lambda copy: copy[1].file_time_ns)

    def close(self) -> None:
        """On shutdown, write the blocks that are only in memory, most recently used first.

        Blocks that are already queued are written first.
        """
        self.disk.flush()
        self.disk.sync(self.trees)
        for candidate in reversed(self.budget.candidates()):
            if self._write(candidate.pool, candidate.block, self.budget.last_use_ns) == "full":
                return

    def lost(self, block: Block) -> None:
        """Remove a block that could not be read or imported."""
        self.lost_blocks += 1
        for tree in self.trees:
            tree.forget(block)
        if block.written:
            # The damaged file would be found again after every restart.
            block.path.unlink(missing_ok=True)

    # --- the disk ---------------------------------------------------------------------------------

    def limit_write_wait(self, n_tokens: int) -> None:
        """Set how long an eviction for `n_tokens` may wait for writes that free memory.

        The limit is a share of the time that computing the tokens would take.
        """
        self._write_wait_s = min(
            tunables.WRITE_WAIT_S, tunables.WRITE_WAIT_SHARE * n_tokens * self.speed.token_s
        )

    def _wait_for_writing(self) -> bool:
        until_s = self._clock() + self._write_wait_s
        self.disk.set_urgent(True)
        written = self._write_wait_s > 0 and self.disk.wait(self._write_wait_s)
        self._write_wait_s = until_s - self._clock()
        self.disk.sync(self.trees)
        return written


# --- checkpoints of a prompt ----------------------------------------------------------------------

IsToken = Callable[[int], bool]


def checkpoints(
    prompt: Sequence[int],
    n_kv: int,
    known: int,
    is_control: IsToken,
    ends_paragraph: IsToken,
    interval: int | None,
) -> list[int]:
    """Points of `prompt` at which its state is to be stored.

    The first `n_kv` tokens are held. `is_control` recognises the tokens around turns, and
    `ends_paragraph` those that end a paragraph. Checkpoints are set:

    - before its last two turns. A client may ask for the answer again, or render that turn
      differently next time. If the question is short, the turn of the answer gets none: a step and
      a state per turn would cost more than recomputing the question.
    - near its end, if no turn begins there.

    If states are kept apart from KV (`interval` is not None), checkpoints are also set:

    - after the first `known` tokens, where the prompt branches off. A prefix with two branches
      usually gets more.
    - once in every `interval` tokens, at the beginning of a turn if there is one.
    - at the beginning of the last paragraph. Instructions or a document come before it, and the
      next question continues from there (Gemma's template puts both in one turn).
    - at a few points towards a long end that has neither a turn nor a paragraph, closer together
      near the end.
    """
    n = len(prompt)
    control = [i for i in range(n) if is_control(prompt[i])]
    turns = [i for i in control if prompt[i] == prompt[control[-1]]]
    points = set(turns[-2:])
    if interval is not None:
        points.add(known)
        start = max(n_kv, known)
        points |= _last_paragraph(prompt, start, ends_paragraph) or _points_near_end(
            points, turns, n
        )
        points |= _evenly_spaced(turns, n, interval)
    last = max((p for p in points if tunables.MIN_GAP_TOKENS <= p < n), default=0)
    if n - last > (tunables.MIN_STEP_GAIN_TOKENS if last else tunables.MIN_GAP_TOKENS):
        points.add(n - tunables.TAIL_TOKENS)
    required = {*turns[-2:-1], n - tunables.TAIL_TOKENS}
    if known == n - 1 and interval is not None:
        # The same prompt was sent twice, so it will probably be sent again.
        required.add(known)
    return _not_too_close([p for p in points if tunables.MIN_GAP_TOKENS <= p < n], required, n_kv)


def _not_too_close(points: Sequence[int], required: set[int], n_kv: int) -> list[int]:
    """The points after `n_kv` that are `required` or not too close to the point before."""
    spaced: list[int] = []
    for point in sorted(p for p in points if p > n_kv):
        before = spaced[-1] if spaced else n_kv
        if point in required or point - before >= tunables.MIN_GAP_TOKENS:
            spaced.append(point)
    return spaced


def _last_paragraph(prompt: Sequence[int], start: int, ends_paragraph: IsToken) -> set[int]:
    """The beginning of the last paragraph, if it is far enough after `start`; else no point."""
    worth = range(len(prompt) - 1, start + tunables.MIN_PARAGRAPH_GAIN_TOKENS - 1, -1)
    return set(next(([i] for i in worth if ends_paragraph(prompt[i - 1])), []))


def _points_near_end(points: set[int], turns: Sequence[int], n: int) -> set[int]:
    """Points at fixed distances before the end of the prompt, without those that have a neighbour.

    If the turn of the answer has just begun, distances count from its beginning.
    """
    if turns and n - turns[-1] < tunables.MIN_GAP_TOKENS:
        end = turns[-1]
    else:
        end = n
    taken_points = {0, *points}

    def has_neighbour(point: int) -> bool:
        return any(
            point - tunables.POINTS_FROM_THE_END[0] <= p < point + tunables.MIN_GAP_TOKENS
            for p in taken_points
        )

    points_before_end = {end - far for far in tunables.POINTS_FROM_THE_END}
    return {point for point in points_before_end if not has_neighbour(point)}


def _evenly_spaced(turns: Sequence[int], n: int, interval: int) -> set[int]:
    points = set()
    for start in range(interval, n, interval):
        turn_starts = [t for t in turns if start - interval < t <= start]
        points.add(turn_starts[-1] if turn_starts else start)
    return points
