"""Where each prefix's KV is, and how a new request gets the longest one: live, resident, or exported.

live      a running request's sequence: shared by forking, which costs nothing where forks share cells
resident  a finished request's sequence, still in the context: taken over whole, which costs nothing either
exported  blocks in the prefix cache (memory, disk): imported by copying

A finished sequence is exported piece by piece between steps and, once all of it is exported, stays resident only while
nobody else runs: every token resident in a unified KV cache slows every other sequence down (12,000 idle ones by 30 %).
One that could not be exported (yet), or is on disk only, stays as long as nobody needs its cells: that costs speed,
dropping it costs a prefill or reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from localllm.engine import restoring
from localllm.engine.disk_tier import DiskBlock, DiskTier
from localllm.engine.job import Job
from localllm.engine.prefix_cache import Block, Match, MemoryBlock, PrefixCache, Room, Tokens, as_tokens, common_prefix
from localllm.engine.restoring import RestorePlan, Restoring
from localllm_backends.contract import Backend, BackendFailure, CannotRewindError, NoCellsError

_STATES: dict[Room, ResidentState] = {"now": "exporting", "later": "awaiting", "never": "refused"}
# Large enough that a block's own overhead vanishes, small enough that one export is a fraction of a step.
_PIECE_TOKENS = 512
# Copying fewer tokens than this back is no faster than computing them.
MIN_TOKENS = 16
# Closing waits this long for the writer to make room for what is not exported yet.
_CLOSE_S = 10.0

# Exporting: there is more of it to export. Awaiting: there is room for that once what is in memory is written. Refused:
# there is no room. Exported: all of it is in the cache. At hand: and in its memory, from where it comes back in no time.
ResidentState = Literal["exporting", "awaiting", "refused", "exported", "at hand"]


@dataclass(eq=False)
class Resident:
    """A finished line still in the context, and how far its export to the prefix cache is: `state`, which held when the
    cache had seen `as_of` changes. `used`: when its request ended, in uses of the cache; it takes no room in the cache
    from what was used since."""

    sequence: int
    tokens: Tokens
    state: ResidentState = "exporting"
    used: int | None = None
    as_of: int | None = None

    @property
    def exported(self) -> bool:
        """All of it is also in the cache."""
        return self.state in ("exported", "at hand")


@dataclass(frozen=True)
class PrefixSource:
    """Where `length` of a prompt's tokens can come from. `known` is how far the prompt followed any known line."""

    kind: Literal["none", "live", "resident", "exported"]
    length: int
    known: int
    resident: Resident | None = None
    sequence: int | None = None
    plan: RestorePlan | None = None


# For a request that takes nothing from others.
NOWHERE = PrefixSource("none", 0, 0, plan=RestorePlan(Match((), 0, None), ()))


@dataclass(frozen=True)
class Taken:
    """A sequence for a request: `held` tokens of its prompt are in it, `rest` is still to be imported (None: nothing)."""

    sequence: int
    held: int
    rest: Restoring | None = None

    def at_once(self) -> tuple[int, int]:
        """(sequence, tokens held) after importing all of it that comes without computing."""
        if self.rest is None:
            return self.sequence, self.held
        while not self.rest.done and self.rest.computes_to is None:
            self.rest.step()
        self.rest.close()
        return self.sequence, self.rest.held


class SequencePool:
    """Owns every sequence that no running job owns, and the prefix cache with its tier on `disk` (None: none)."""

    def __init__(self, backend: Backend, cache: PrefixCache, disk: DiskTier | None = None) -> None:
        self._backend = backend
        self.cache = cache
        self._disk = disk
        self._residents: list[Resident] = []
        self._token_bytes = 0.0
        self.prefill_tok_s: Callable[[], float | None] = lambda: None
        self.restored_tokens = 0
        self.lost_blocks = 0

    # --- finding -------------------------------------------------------------------------------------------------

    def lookup(self, prompt: Tokens, live: Iterable[Job]) -> PrefixSource:
        """The best source for `prompt`. One token is always left to compute: its logits are needed."""
        self._hear()
        most = len(prompt) - 1
        plan = self.plan(prompt)
        best = PrefixSource("none", 0, 0)
        known = plan.match.known
        if plan.saved >= MIN_TOKENS:
            best = PrefixSource("exported", plan.saved, known, plan=plan)
        for job in live:
            if job.sequence is None:
                continue
            shared = min(most, common_prefix(as_tokens(job.tokens[: job.n_kv]), prompt))
            known = max(known, shared)
            if shared > best.length and (self._can_split or shared == job.n_kv):
                best = PrefixSource("live", shared, known, sequence=job.sequence)
        for resident in self._residents:
            shared = min(most, common_prefix(resident.tokens, prompt))
            known = max(known, shared)
            if shared >= max(best.length, 1) and self._may_take(resident, shared):
                best = PrefixSource("resident", shared, known, resident=resident)
        return PrefixSource(best.kind, best.length, known, best.resident, best.sequence, best.plan)

    def plan(self, prompt: Tokens) -> RestorePlan:
        """What to take of what the cache holds of `prompt`."""
        tok_s, disk = self.prefill_tok_s(), self._disk
        return restoring.plan(self.cache, prompt[:-1], lambda b, n: disk is None or disk.worth_reading(b, n, tok_s))

    @property
    def _can_split(self) -> bool:
        return self._backend.capabilities.rewind == "any"

    def _may_take(self, resident: Resident, length: int) -> bool:
        """A line that can't be forked, and is nowhere else, is not cut to a smaller part of itself."""
        return self._can_split or resident.exported or 2 * length >= len(resident.tokens)

    def needs_cells(self, source: PrefixSource, n_tokens: int) -> int:
        """Free cells needed to hold `n_tokens` of which `source` brings its share: a resident line's own, a live one's
        where forks share cells."""
        brings = source.kind == "resident" or (source.kind == "live" and self._backend.capabilities.shares_cells)
        return n_tokens - (source.length if brings else 0)

    # --- taking --------------------------------------------------------------------------------------------------

    def take(self, source: PrefixSource, prompt: Tokens) -> Taken:
        """A sequence that holds as much of `prompt` as `source` gives, now or once its `rest` is imported. Falls back to
        what the cache has, then to an empty sequence; raises NoCellsError when there is no sequence left."""
        # However it comes back, the line is in use again: its copies in the cache are the last to go.
        if source.kind != "none":
            self.cache.match(prompt[:-1])
        if source.kind == "resident" and source.resident is not None:
            taken = self._take_resident(source.resident, source.length)
            if taken is not None:
                return Taken(taken, source.length)
        if source.kind == "live" and source.sequence is not None:
            try:
                return Taken(self._backend.fork(source.sequence, source.length), source.length)
            except CannotRewindError:
                pass
        plan = source.plan or self.plan(prompt)
        sequence = self._new_sequence(source.resident)
        return Taken(sequence, 0, Restoring(self, self._backend, sequence, prompt, plan))

    def _new_sequence(self, in_the_way: Resident | None) -> int:
        try:
            return self._backend.new_sequence()
        except NoCellsError:
            # The resident that was to be taken over could not be cut back: its place is the one that was counted on.
            if in_the_way not in self._residents:
                raise
            self._drop(in_the_way)
            return self._backend.new_sequence()

    def _take_resident(self, resident: Resident, length: int) -> int | None:
        if length < len(resident.tokens) and not resident.exported:
            forked = self._fork(resident, length) if self._can_split else None
            if forked is not None:
                return forked
            self._export_next(resident, force=True)
        try:
            self._backend.truncate(resident.sequence, length)
        except CannotRewindError:
            return None
        self._residents.remove(resident)
        return resident.sequence

    def _fork(self, resident: Resident, length: int) -> int | None:
        """The beginning of a line whose end is still to be exported; None if there is no sequence left for it."""
        others = [r for r in self._residents if r is not resident]
        while True:
            try:
                return self._backend.fork(resident.sequence, length)
            except NoCellsError:
                if not others:
                    return None
                self._export_all(others[0])
                self._drop(others.pop(0))

    # --- giving back ---------------------------------------------------------------------------------------------

    def release(self, sequence: int, tokens: Tokens, *, keep: bool = True) -> None:
        """A job is done with `sequence`, which holds `tokens`. Kept as resident unless too short or unwanted."""
        if not keep or len(tokens) < MIN_TOKENS:
            self._backend.drop(sequence)
            return
        self.cache.match(tokens)
        state: ResidentState = "exporting" if self.cache.gap(tokens) is not None else "exported"
        self._residents.append(Resident(sequence, tokens.copy(), state, self.cache.uses))

    def park(self, sequence: int, tokens: Tokens) -> None:
        """Take a running job out of the context at once, keeping its KV in the cache."""
        self._export_all(Resident(sequence, tokens.copy()))
        self._backend.drop(sequence)

    def checkpoint(self, sequence: int, tokens: Tokens) -> None:
        """Store the state after exactly `tokens`, for models that can't go back there later."""
        if self.cache.whole and self.cache.gap(tokens) is not None:
            self._store(sequence, tokens, 0)

    def tick(self, *, busy: bool) -> bool:
        """Export one piece of one resident, if any can be; drop exported ones while others run.

        Returns True while there is more to do without new requests and without waiting for the disk."""
        self._hear()
        for resident in self._residents:
            if not resident.exported and self._export_next(resident):
                break
        if self._disk is not None:
            self._disk.hurry(self.waiting)
        self._hear()
        # One stays for the next turn of the chat just answered; the others are in the cache.
        for resident in [r for r in (self._residents if busy else self._residents[:-1]) if r.state == "at hand"]:
            self._drop(resident)
        return any(not r.exported and not self._refused(r) for r in self._residents)

    def finish(self) -> None:
        """Export what is resident, waiting for room if it must: nothing else is going on any more."""
        while self._residents:
            more = self.tick(busy=True)
            if not more and not (self.waiting and self._disk is not None and self._disk.wait(_CLOSE_S)):
                return

    @property
    def waiting(self) -> bool:
        """True while something could be exported if only what is in memory were written."""
        return any(r.state == "awaiting" for r in self._residents)

    def make_room(self, cells: int, *, live: int, keep: Resident | None = None) -> bool:
        """Drop residents (exporting them first) until `cells` are free and one more sequence than `live` fits."""
        self._hear()
        for resident in sorted(self._residents, key=lambda r: not r.exported):
            if self._has_room(cells, live):
                return True
            if resident is not keep:
                self._export_all(resident)
                self._drop(resident)
        return self._has_room(cells, live)

    def _has_room(self, cells: int, live: int) -> bool:
        return self._backend.cells_free() >= cells and live + len(self._residents) <= self._backend.info.n_seq_max

    @property
    def residents(self) -> int:
        """Finished sequences still in the context."""
        return len(self._residents)

    def _refused(self, resident: Resident) -> bool:
        """There was no room for it, and nothing has changed since."""
        return resident.state in ("awaiting", "refused") and resident.as_of == self.cache.changes

    def _drop(self, resident: Resident) -> None:
        self._residents.remove(resident)
        self._backend.drop(resident.sequence)

    # --- the cache -----------------------------------------------------------------------------------------------

    def store(self, sequence: int, tokens: Tokens, start: int) -> None:
        """Put what `sequence` holds of `tokens` from `start` on into the cache, if there is room."""
        while start < len(tokens):
            stop = min(len(tokens), start + _PIECE_TOKENS)
            if self._store(sequence, tokens[:stop], start) != "now":
                return
            start = stop

    def lost(self, block: Block) -> None:
        """A block could not be read or imported."""
        self.lost_blocks += 1
        self.cache.forget(block)
        if isinstance(block, DiskBlock):
            # It would be found again after every restart.
            block.path.unlink(missing_ok=True)

    def _hear(self) -> None:
        """What became of the copies since: written, demoted to disk, evicted."""
        if self._disk is not None:
            self._disk.news(self.cache)
        for resident in self._residents:
            if resident.exported and resident.as_of != self.cache.changes:
                resident.state, resident.as_of = self._copies(resident.tokens), self.cache.changes

    def _copies(self, tokens: Tokens) -> ResidentState:
        if self.cache.gap(tokens) is not None:
            return "exporting"
        in_memory = all(part.block.held_bytes for part in self.cache.peek(tokens).parts)
        return "at hand" if in_memory else "exported"

    def _export_all(self, resident: Resident) -> None:
        """Export what there is room for, now: its cells are needed, so what is still to be written is not waited for."""
        while not resident.exported and self._export_next(resident, force=True):
            pass

    def _export_next(self, resident: Resident, *, force: bool = False) -> bool:
        """Export one piece; False if it can't be had, or there is no room for it in the cache."""
        if self._refused(resident) and not force:
            return False
        gap = self.cache.gap(resident.tokens)
        room: Room = "now"
        if gap is not None:
            start, stop = gap
            stop = stop if self.cache.whole else min(stop, start + _PIECE_TOKENS)
            room = self._store(resident.sequence, resident.tokens[:stop], start, resident.used, force=force)
            gap = self.cache.gap(resident.tokens)
        if gap is None:
            resident.state, resident.as_of = "exported", None
        else:
            resident.state, resident.as_of = _STATES[room], self.cache.changes
        return room == "now"

    def _store(
        self, sequence: int, tokens: Tokens, start: int, used: int | None = None, *, force: bool = False
    ) -> Room:
        """Export the end of `tokens` from `start` on and put it into the cache: "now" if that was done."""
        n_tokens = len(tokens) - start
        guess = 0 if self.cache.whole else int(self._token_bytes * n_tokens)
        room = self.cache.make_room(guess, line=tokens, used=used, force=force)
        if room != "now":
            return room
        try:
            data = self._backend.export_range(sequence, start, len(tokens))
        except BackendFailure:
            return "never"
        # The least seen: a block of a few tokens is mostly header.
        self._token_bytes = min(self._token_bytes or len(data), len(data) / n_tokens)
        room = self.cache.make_room(len(data), line=tokens, used=used, force=force)
        if room != "now":
            return room
        block = self._block(tokens, data, start)
        stored = self.cache.insert(tokens, block, used)
        if stored and isinstance(block, DiskBlock) and self._disk is not None:
            self._disk.keep(block, tokens)
        return "now" if stored else "never"

    def _block(self, tokens: Tokens, data: bytes, start: int) -> MemoryBlock | DiskBlock:
        if self._disk is None:
            return MemoryBlock(data, start, len(tokens))
        return self._disk.make_block(tokens, data, start, len(tokens))
