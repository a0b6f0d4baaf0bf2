"""Owns the sequences in the context, and finds the longest available prefix for a new request.

The KV of a prefix can be in three places:

running   a running request's sequence. It is forked, which is free if forks share cells.
idle      a finished request's sequence, still in the context. The new request takes it over,
          which is free as well.
cached    blocks in the prefix cache (memory, disk). They are imported by copying.

A finished sequence is exported in pieces between steps. After its export it stays in the context
only until another request runs. Every token in a unified KV cache slows down all other sequences
(12,000 idle tokens: by 30 %).

On a device, exporting KV is the expensive part. Idle sequences stay there as long as their tokens
do not make the steps of others longer. The eviction order is in cache/eviction.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from localllm.engine.cache import eviction, tunables
from localllm.engine.cache.eviction import Block, IdleSequence
from localllm.engine.cache.matching import (
    NO_SOURCE,
    FollowedTree,
    PrefixSource,
    PromptMatch,
    RunningSequence,
)
from localllm.engine.cache.restore import Restoration
from localllm.engine.cache.store import KvStore, checkpoints
from localllm.engine.cache.tree import PrefixCache
from localllm.engine.tokens import Tokens, media_boundary
from localllm_backends.contract import Backend, BackendFailure, CannotRewindError, NoCellsError


class SequencePool:
    """Owns every sequence that no running request owns, and the cached KV of other sequences
    (`kv`).
    """

    def __init__(self, backend: Backend, kv: KvStore) -> None:
        self._backend = backend
        self.kv = kv
        self.cache = kv.cache
        self._followed = FollowedTree(kv.cache)
        self._can_split = backend.capabilities.rewind == "any"
        self.idle: list[IdleSequence] = []
        self.running: Mapping[str, RunningSequence] = {}
        kv.budget.in_context = self.in_context
        self._evicting: int | None = None
        memory = backend.memory()
        self._token_share = memory.kv_bytes / backend.info.n_ctx / max(memory.weights_bytes, 1)
        self.restored_tokens = 0

    def snapshot(self) -> dict[str, int]:
        """Counters and sizes of the pool and the cache, as plain values."""
        return {
            "residents": len(self.idle),
            "restored_tokens": self.restored_tokens,
            "cache_bytes": self.kv.budget.held_bytes,
            "cache_capacity_bytes": self.kv.budget.capacity_bytes,
            "cache_evicted_tokens": self.cache.evicted_tokens,
            "lost_blocks": self.kv.lost_blocks,
            **self.kv.disk.snapshot(),
        }

    # --- finding ----------------------------------------------------------------------------------

    def lookup(self, prompt: PromptMatch, running: Iterable[RunningSequence]) -> PrefixSource:
        """The best source for `prompt`. One token is always left to compute, because its logits
        are needed.
        """
        self._sync()
        max_reused = len(prompt.tokens) - 1
        plan = prompt.plan(self.kv.version(), self.kv.plan)
        known = plan.known
        length = plan.saved if plan.saved >= tunables.MIN_TOKENS else 0
        best = PrefixSource(length, plan=plan)
        candidates: list[RunningSequence | IdleSequence] = [*running, *self.idle]
        for other in candidates:
            if other.sequence is None:
                continue
            idle = other if isinstance(other, IdleSequence) else None
            if isinstance(other, IdleSequence):
                n_present = len(other.tokens)
            else:
                n_present = other.n_kv
            shared = media_boundary(prompt.tokens, min(max_reused, n_present, prompt.shared(other)))
            known = max(known, shared)
            # Taking over an idle sequence costs less than a fork, so it wins if both hold as many
            # tokens.
            min_length = max(best.length + (idle is None), 1)
            if not shared or shared + plan.saved_after(shared) < min_length:
                continue
            reused, state = self._reusable_tokens(other.sequence, shared, n_present, prompt.tokens)
            further = plan.rest_after(reused)
            length = reused + further.saved
            if length < min_length:
                continue
            best = PrefixSource(length, known, reused, idle, other.sequence, further, state)
        return replace(best, known=known)

    def _reusable_tokens(
        self, sequence: int, shared: int, n_present: int, prompt: Tokens
    ) -> tuple[int, Block | None]:
        """How many of the `shared` tokens another sequence could take over, and the state this
        needs.

        `n_present`: the tokens that the source sequence holds in total.
        """
        if shared == n_present or self._can_split or self._backend.can_rewind(sequence, shared):
            return shared, None
        return self.kv.longest_state(prompt[:shared])

    def can_reserve(self, cells: int, source: PrefixSource) -> bool:
        """Are this many cells free or in idle sequences, without those that `source` brings?"""
        reservable = self._backend.cells_free() + sum(len(i.tokens) for i in self.idle)
        if source.idle is not None:
            reservable -= source.reused
        return reservable >= cells

    def needs_cells(self, source: PrefixSource, n_tokens: int) -> int:
        """Free cells needed to hold `n_tokens`.

        An idle source brings its own cells. A running one brings them if forks share cells.
        """
        if source.idle is not None or self._backend.capabilities.shares_cells:
            return n_tokens - source.reused
        return n_tokens

    # --- taking -----------------------------------------------------------------------------------

    def take(self, source: PrefixSource, prompt: Tokens) -> Restoration:
        """Return a Restoration whose sequence gets as much of `prompt` as `source` provides.

        Some parts may still have to be imported. Falls back to the cache's parts, then to an empty
        sequence. Raises NoCellsError if there is no sequence left.
        """
        # The sequence is in use again, whatever its source. Its copies in the cache become the
        # last to be evicted.
        if source.length:
            self.kv.touch(prompt[:-1])
        sequence = None
        if source.idle is not None:
            sequence = self._take_idle(source.idle, source.reused, source.state)
        elif source.sequence is not None:
            sequence = self._fork(source.sequence, source.reused, source.state)
        if sequence is not None:
            self._keep_state(sequence, source, prompt)
            return Restoration(self.kv, self._backend, sequence, prompt, source.plan, source.reused)
        if source.sequence is None:
            plan = source.plan
        else:
            plan = self.kv.plan(prompt)
        sequence = self._new_sequence(source.idle)
        return Restoration(self.kv, self._backend, sequence, prompt, plan)

    def _keep_state(self, sequence: int, source: PrefixSource, prompt: Tokens) -> None:
        """Store the state at a branch in the middle of a turn, while the sequence is at that point.

        The next sequence will probably branch at the same point.
        """
        if self.kv.states is None or self.kv.snapshots or source.state is not None:
            return
        point, _ = self.kv.longest_state(prompt[: source.reused])
        if source.reused - point > tunables.MIN_STATE_GAIN_TOKENS:
            self.checkpoint(sequence, prompt[: source.reused])

    def _new_sequence(self, blocking: IdleSequence | None) -> int:
        try:
            return self._backend.new_sequence()
        except NoCellsError:
            # The idle sequence to be taken over could not be truncated. Its slot is needed, so it
            # is dropped.
            if blocking not in self.idle:
                raise
            self._drop(blocking)
            return self._backend.new_sequence()

    def _take_idle(self, idle: IdleSequence, length: int, state: Block | None) -> int | None:
        """The sequence truncated to `length`, or a fork if the end is not exported yet; None if
        neither works.
        """
        if length < len(idle.tokens) and not idle.exported:
            forked = self._fork_idle(idle, length, state)
            if forked is not None:
                return forked
            # A sequence that can't be forked, and is not exported, is not cut to less than half.
            if not self._can_split and 2 * length < len(idle.tokens):
                return None
            self._export_next(idle, force=True)
        if state is not None and not self._cut_to_state(idle, length, state):
            return None
        try:
            self._backend.truncate(idle.sequence, length)
        except CannotRewindError:
            return None
        self.idle.remove(idle)
        return idle.sequence

    def _cut_to_state(self, idle: IdleSequence, length: int, state: Block) -> bool:
        data = self.kv.read(state)
        try:
            if data is not None:
                self._backend.import_state(idle.sequence, data, length)
                return True
        except BackendFailure:
            self._drop(idle)
        self.kv.lost(state)
        return False

    def _fork(self, sequence: int, length: int, state: Block | None) -> int | None:
        """A fork of a sequence at `length`; None if it is impossible. Raises NoCellsError if there
        is no room.
        """
        try:
            if state is None:
                return self._backend.fork(sequence, length)
            data = self.kv.read(state)
            if data is not None:
                return self._backend.fork_state(sequence, data, length)
        except NoCellsError:
            raise
        except CannotRewindError:
            return None
        except BackendFailure:
            pass
        if state is not None:
            self.kv.lost(state)
        return None

    def _fork_idle(self, idle: IdleSequence, length: int, state: Block | None) -> int | None:
        """Fork the first `length` tokens of a sequence whose end is still to be exported.

        Evicts other idle sequences if there is no room. Returns None if there is still no sequence
        left.
        """
        others = [other for other in self.idle if other is not idle]
        while True:
            try:
                return self._fork(idle.sequence, length, state)
            except NoCellsError:
                if not others:
                    return None
                self._evict(others.pop(0))

    # --- giving back ------------------------------------------------------------------------------

    def cut(self, sequence: int, n_tokens: int) -> None:
        """Drop all but the first `n_tokens` of a request's sequence. Raises CannotRewindError if
        that is impossible.
        """
        self._backend.truncate(sequence, n_tokens)

    def release(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> None:
        """Take over `sequence`, which holds `tokens`, from a finished request.

        The sequence becomes idle, unless it is too short or `keep` is False.
        """
        if not keep or len(tokens) < tunables.MIN_TOKENS:
            self._backend.drop(sequence)
            return
        self.kv.touch(tokens)
        exported = self.kv.holds(tokens)
        self.idle.append(
            IdleSequence(sequence, tokens.copy(), exported, self.kv.budget.last_use_ns)
        )

    def park(self, sequence: int, tokens: Tokens) -> None:
        """Take a running request out of the context at once, and keep its KV in the cache."""
        self.idle.append(IdleSequence(sequence, tokens.copy()))
        self._evict(self.idle[-1])

    def checkpoint(self, sequence: int, tokens: Tokens) -> None:
        """Store the state after exactly `tokens`, for models that can't rewind to them later."""
        if not self.kv.has_state(tokens):
            self.kv.store_state(sequence, tokens, newer=True)

    def checkpoints(self, prompt: list[int], n_kv: int, known: int) -> list[int]:
        """The points of `prompt` at which `checkpoint` is to be called.

        The first `n_kv` tokens are held, and the first `known` tokens were known before.
        """
        if self.kv.states is None:
            return []
        interval = None
        if not self.kv.snapshots:
            interval = self.kv.state_interval(len(prompt))
        backend = self._backend
        found = checkpoints(
            prompt,
            n_kv,
            known,
            lambda token: token >= 0 and backend.is_control(token),
            lambda token: token >= 0 and backend.token_bytes(token).endswith(b"\n\n"),
            interval,
        )
        points = {media_boundary(prompt, point) for point in found}
        return sorted(point for point in points if point > n_kv)

    # --- leaving the context ----------------------------------------------------------------------

    def tick(self, *, busy: bool, live: int = 0) -> bool:
        """Export one piece of one idle sequence, if possible. Evict exported sequences while
        others run.

        `live` requests are running. Returns True while there is more to do without new requests
        and without waiting for the disk.
        """
        self._sync()
        info = self._backend.info
        capabilities = self._backend.capabilities
        n_sequences = live + len(self.idle)
        if not (
            busy
            and eviction.exporting_can_wait(
                capabilities, info, self._backend.cells_free(), n_sequences, self._idle_step_share
            )
        ):
            for idle in reversed(self.idle) if self.kv.closing else self.idle:
                if not idle.exported and self._export_next(idle):
                    break
        self.kv.disk.set_urgent(self.waiting)
        self._sync()
        self._evict_exported(busy=busy)
        return any(not (idle.exported or self._has_no_room(idle)) for idle in self.idle)

    def evict_idle(self, n_tokens: int, *, live: int, clock: Callable[[], float]) -> None:
        """Evict idle sequences before a step that only reads `n_tokens` of prompts.

        `live` requests are running. Exported sequences are evicted at once. The others are
        exported first, as far as that pays.
        """
        if not live or not self.idle:
            return
        self._sync()
        self._evict_exported(busy=True)
        limit_s = eviction.export_time_s(
            self._backend.capabilities, n_tokens, self.kv.speed.token_s
        )
        started_s = clock()
        while clock() - started_s < limit_s and self.tick(busy=True, live=live):
            pass

    def make_room(
        self,
        cells: int,
        *,
        live: int,
        source: PrefixSource = NO_SOURCE,
        prompt: Tokens | None = None,
    ) -> bool:
        """Truncate or drop idle sequences until `cells` are free and `live` sequences fit.

        Their tokens are exported first. The tokens that `source` and the cache hold of `prompt`,
        for which room is made, are kept. Returns True if there is enough room.
        """
        if self._has_room(cells, live):
            return True
        self._sync()
        if prompt is not None and self.idle:
            self.kv.touch(prompt)
        self.kv.limit_write_wait(cells if len(self.running) <= (prompt is None) else 0)
        for idle in eviction.context_order(self.idle):
            min_kept = source.reused if idle is source.idle else 0
            while not self._has_room(cells, live) and self._shorten(
                idle, cells - self._backend.cells_free(), min_kept
            ):
                pass
        return self._has_room(cells, live)

    def _shorten(self, idle: IdleSequence, cells: int, min_kept: int) -> bool:
        """Take `cells`, or a piece if that is more, from the end of an idle sequence, exporting
        them first.

        Its first `min_kept` tokens stay. The whole sequence is evicted if it can't be truncated or
        little would remain. Returns True if it has more tokens to give.
        """
        start = max(len(idle.tokens) - max(cells, tunables.PIECE_TOKENS), 0)
        divisible = self._can_split and self.kv.states is None
        start = media_boundary(
            idle.tokens, max(start if start >= tunables.PIECE_TOKENS else 0, min_kept)
        )
        if (not divisible or cells <= 0) and min_kept:
            return False
        if not start or not divisible or cells <= 0:
            self._evict(idle)
            return False
        if start < len(idle.tokens):
            tokens = idle.tokens
            idle.tokens = idle.tokens[:start].copy()
            self.kv.export_end(idle.sequence, tokens, start, idle.used_ns)
            self._backend.truncate(idle.sequence, start)
            idle.exported = self.kv.holds(idle.tokens)
            idle.space = "free"
        return start > min_kept

    def in_context(self) -> Iterator[tuple[PrefixCache, Block]]:
        """Cached blocks whose tokens are also in the context.

        Blocks come first if their sequence will stay in the context longest.
        """
        if self.kv.states is not None:
            return
        for job in self.running.values():
            if job.sequence not in (None, self._evicting):
                yield from self._followed.copies(job, self._backend.length(job.sequence))
        for idle in reversed(self.idle):
            yield from self._followed.copies(idle, len(idle.tokens))

    def drop_one(self) -> bool:
        """Free cells for one more step from an idle sequence, whatever number the backend reports
        as free.

        Returns False if there is no idle sequence.
        """
        if not self.idle:
            return False
        self._sync()
        self._shorten(eviction.context_order(self.idle)[0], self._backend.info.n_batch, 0)
        return True

    def finish(self) -> None:
        """Export the idle sequences on shutdown, waiting for room in memory if necessary."""
        self.kv.closing = True
        while self.idle:
            more = self.tick(busy=False)
            if not more and not (self.waiting and self.kv.disk.wait(tunables.CLOSE_S)):
                break
        self.kv.close()

    @property
    def waiting(self) -> bool:
        """True while an export waits for blocks in memory to be written to disk."""
        return any(idle.space == "pending" for idle in self.idle)

    def _has_room(self, cells: int, live: int) -> bool:
        return (
            self._backend.cells_free() >= cells
            and live + len(self.idle) <= self._backend.info.n_seq_max
        )

    @property
    def _idle_step_share(self) -> float:
        """About the share that idle tokens add to a step, which reads the weights and all KV."""
        return self._token_share * sum(len(idle.tokens) for idle in self.idle)

    def _evict_exported(self, *, busy: bool) -> None:
        capabilities = self._backend.capabilities
        for idle in eviction.sequences_to_evict(
            self.idle, capabilities, busy=busy, step_share=self._idle_step_share
        ):
            self._drop(idle)

    def _drop(self, idle: IdleSequence) -> None:
        self.idle.remove(idle)
        self._backend.drop(idle.sequence)

    def _evict(self, idle: IdleSequence) -> None:
        """Export as much as there is room for, then drop the sequence, because its cells are
        needed.
        """
        self.idle.remove(idle)
        self._evicting = idle.sequence
        if self.kv.states is None:
            self.kv.export_end(idle.sequence, idle.tokens, 0, idle.used_ns)
        else:
            while not idle.exported and self._export_next(idle, force=True):
                pass
        self._evicting = None
        self._backend.drop(idle.sequence)

    # --- exporting --------------------------------------------------------------------------------

    def _sync(self) -> None:
        """Apply the changes since the last call: copies written, demoted to disk, or evicted."""
        self.kv.disk.sync(self.kv.trees)
        changes = self.kv.budget.changes
        for idle in self.idle:
            if idle.exported and idle.seen_changes != changes:
                idle.exported = self.kv.holds(idle.tokens)
                idle.seen_changes = changes

    def _has_no_room(self, idle: IdleSequence) -> bool:
        """True if there was no room for the sequence, and the cache has not changed since."""
        return idle.space != "free" and idle.seen_changes == self.kv.budget.changes

    def _export_next(self, idle: IdleSequence, *, force: bool = False) -> bool:
        """Export one piece. Returns False if the export fails or the cache has no room for it."""
        if self._has_no_room(idle) and not force:
            return False
        space = self.kv.export_next(idle.sequence, idle.tokens, idle.used_ns, force=force)
        idle.exported = self.kv.holds(idle.tokens)
        idle.seen_changes = self.kv.budget.changes
        idle.space = "free" if idle.exported else space or "full"
        return space in (None, "free")
